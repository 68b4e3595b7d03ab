from pallas_kernels.attention.numerics import Numerics, Schedule
from pallas_kernels.attention.op import attention_chunks, attention_decode

__all__ = ["Numerics", "Schedule", "attention_chunks", "attention_decode"]
