"""The native twins: the definitions, run by XLA as they are."""

from pallas_kernels.causal_conv.reference import causal_conv_chunks, causal_conv_decode

__all__ = ["causal_conv_chunks", "causal_conv_decode"]
