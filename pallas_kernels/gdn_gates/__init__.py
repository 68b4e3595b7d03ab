from pallas_kernels.gdn_gates.op import gdn_gates

__all__ = ["gdn_gates"]
