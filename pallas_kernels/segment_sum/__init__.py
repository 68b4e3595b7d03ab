from pallas_kernels.segment_sum.kernel import Schedule
from pallas_kernels.segment_sum.op import segment_sum

__all__ = ["Schedule", "segment_sum"]
