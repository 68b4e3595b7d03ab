from pallas_kernels.gdn.numerics import Numerics, Schedule
from pallas_kernels.gdn.op import gdn_chunks, gdn_close, gdn_decode
from pallas_kernels.gdn.slots import OpenChunk, gdn_slots

__all__ = ["Numerics", "OpenChunk", "Schedule", "gdn_chunks", "gdn_close", "gdn_decode", "gdn_slots"]
