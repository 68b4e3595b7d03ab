"""The native twins: the definitions, run by XLA as they are."""

from pallas_kernels.swiglu.reference import swiglu, swiglu_fused

__all__ = ["swiglu", "swiglu_fused"]
