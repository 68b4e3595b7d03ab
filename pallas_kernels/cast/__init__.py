from pallas_kernels.cast.op import cast

__all__ = ["cast"]
