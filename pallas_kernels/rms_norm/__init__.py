from pallas_kernels.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
