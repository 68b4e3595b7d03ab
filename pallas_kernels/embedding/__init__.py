from pallas_kernels.embedding.kernel import Schedule
from pallas_kernels.embedding.op import embed

__all__ = ["Schedule", "embed"]
