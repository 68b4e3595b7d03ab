from pallas_kernels.residual_add.op import residual_add

__all__ = ["residual_add"]
