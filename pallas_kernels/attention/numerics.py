"""What decides the bits of attention, and what only its speed."""

import dataclasses

from isojax.layouts import CHUNK


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """Decides the bits of `attention_chunks` and `attention_decode`.

    Attributes:
        kv_block: Tokens of KV that one step of the online softmax takes in; divides 64.
        kv_split: Tokens of KV whose steps form one chain, a multiple of 64. Splits are combined
            afterwards, in ascending order.
    """

    kv_block: int = 64
    kv_split: int = 1024

    def __post_init__(self):
        if self.kv_block not in (16, 32, 64):
            raise ValueError(f"attention takes in KV by 16, 32 or 64 tokens, got kv_block={self.kv_block}")
        if self.kv_split <= 0 or self.kv_split % CHUNK:
            raise ValueError(f"attention splits KV between {CHUNK}-token chunks, got kv_split={self.kv_split}")


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of `attention_chunks`, never its bits.

    Attributes:
        heads: Query heads of a group that share a product tile of 64·heads rows: 1, 2 or 4, as long as
            it divides the group. Taller tiles are not known to keep the bits of a row.
    """

    heads: int = 4

    def __post_init__(self):
        if self.heads not in (1, 2, 4):
            raise ValueError(f"attention puts 1, 2 or 4 query heads into a tile, got heads={self.heads}")
