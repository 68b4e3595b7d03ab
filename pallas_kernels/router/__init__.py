from pallas_kernels.router import stock
from pallas_kernels.router.op import load_balancing_loss, router, router_load

__all__ = ["load_balancing_loss", "router", "router_load", "stock"]
