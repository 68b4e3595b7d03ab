from pallas_kernels.experts import stock
from pallas_kernels.experts.kernel import Schedule
from pallas_kernels.experts.op import gather_rows, grouped_linear
from pallas_kernels.experts.plan import Plan, dispatch_plan

__all__ = ["Plan", "Schedule", "dispatch_plan", "gather_rows", "grouped_linear", "stock"]
