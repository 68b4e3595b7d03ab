"""The native twin: the definition, run by XLA as it is."""

from pallas_kernels.l2_norm.reference import l2_norm

__all__ = ["l2_norm"]
