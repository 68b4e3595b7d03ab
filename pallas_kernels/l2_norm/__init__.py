from pallas_kernels.l2_norm.op import l2_norm

__all__ = ["l2_norm"]
