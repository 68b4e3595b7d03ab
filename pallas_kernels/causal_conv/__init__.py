from pallas_kernels.causal_conv.op import causal_conv_chunks, causal_conv_decode

__all__ = ["causal_conv_chunks", "causal_conv_decode"]
