from pallas_kernels.gated_norm.op import gated_norm

__all__ = ["gated_norm"]
