from pallas_kernels.norm_rope.op import norm_rope
from pallas_kernels.norm_rope.tables import rotary_tables

__all__ = ["norm_rope", "rotary_tables"]
