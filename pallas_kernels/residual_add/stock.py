"""The native twin: the definition, run by XLA as it is."""

from pallas_kernels.residual_add.reference import residual_add

__all__ = ["residual_add"]
