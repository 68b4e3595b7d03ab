from pallas_kernels.moe_combine import stock
from pallas_kernels.moe_combine.op import moe_combine

__all__ = ["moe_combine", "stock"]
