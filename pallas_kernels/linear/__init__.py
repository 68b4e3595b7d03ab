from pallas_kernels.linear.numerics import Numerics, Schedule
from pallas_kernels.linear.op import column_linear, row_linear

__all__ = ["Numerics", "Schedule", "column_linear", "row_linear"]
