from pallas_kernels.swiglu import stock
from pallas_kernels.swiglu.op import swiglu, swiglu_fused

__all__ = ["stock", "swiglu", "swiglu_fused"]
