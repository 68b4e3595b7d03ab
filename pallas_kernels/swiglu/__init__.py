from pallas_kernels.swiglu.op import swiglu, swiglu_fused

__all__ = ["swiglu", "swiglu_fused"]
