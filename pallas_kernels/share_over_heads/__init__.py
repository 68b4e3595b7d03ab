from pallas_kernels.share_over_heads.op import share_over_heads

__all__ = ["share_over_heads"]
