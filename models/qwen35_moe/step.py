"""What one forward gets: tokens on the grid, and where their sequences live in the cache."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from isojax.layouts import CHUNK, Segments
from isojax.pytrees import pytree
from pallas_kernels.step import Chunks, Decode


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A ragged batch: first the decode rows, then the blocks of 64 rows (docs/architecture.md).

    Attributes:
        tokens: Token of every row; rows that are not there hold any valid token.
        decode: Positions of the decode rows, or None when there are none.
        chunks: The blocks of 64 rows, or None when there are none.
    """

    tokens: Int32[Array, " rows"]
    decode: Decode | None
    chunks: Chunks | None

    @property
    def decode_rows(self) -> int:
        """Number of rows before the blocks."""
        return 0 if self.decode is None else self.decode.position.shape[0]

    @property
    def positions(self) -> Int32[Array, " rows"]:
        """Absolute position of every row in its sequence."""
        rows = [] if self.decode is None else [self.decode.position]
        if self.chunks is not None:
            rows.append((self.chunks.index[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)).reshape(-1))
        return jnp.concatenate(rows)

    @property
    def valid(self) -> Bool[Array, " rows"]:
        """Whether each row is there."""
        rows = [] if self.decode is None else [self.decode.valid]
        if self.chunks is not None:
            row = jnp.arange(CHUNK)
            inside = (row >= self.chunks.begin[:, None]) & (row < self.chunks.end[:, None])
            rows.append(inside.reshape(-1))
        return jnp.concatenate(rows)

    @property
    def segments(self) -> Segments | None:
        """The sequence of every 64 rows, for gradients; None with decode rows, which have none."""
        if self.chunks is None or self.decode is not None:
            return None
        return Segments(self.chunks.sequence, self.chunks.num_sequences)


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Residency:
    """Where sequences live in the cache, one entry a sequence of the step.

    Ids beyond the cache (`num_blocks`, `num_slots`) mean nowhere: nothing is written there.

    Attributes:
        start: Tokens of the sequence computed before this step.
        fresh: Whether this is its first step since admission: the state comes from its page, not its slot.
        slot: Its slot of per-request state.
        kv_pages: Its pages of keys and values, in order.
        state_in: For each group of Gated DeltaNet layers, the page that its state is read from.
        state_out: The page that its state is written to.
    """

    start: Int32[Array, " sequences"]
    fresh: Bool[Array, " sequences"]
    slot: Int32[Array, " sequences"]
    kv_pages: Int32[Array, "sequences pages"]
    state_in: Int32[Array, "groups sequences"]
    state_out: Int32[Array, "groups sequences"]


def whole_sequences(lengths: np.ndarray | list[int], num_blocks: int | None = None) -> Chunks:
    """The blocks of sequences that are there from their first token, one after another: a packed batch.

    Args:
        lengths: Tokens of each sequence.
        num_blocks: Number of blocks to pad to; by default no padding.

    Raises:
        ValueError: If the sequences need more blocks.
    """
    blocks = [(s, c, min(CHUNK, n - c * CHUNK)) for s, n in enumerate(lengths) for c in range(-(-n // CHUNK))]
    num_blocks = len(blocks) if num_blocks is None else num_blocks
    if len(blocks) > num_blocks:
        raise ValueError(f"sequences of {list(lengths)} tokens need {len(blocks)} blocks of 64 rows, got {num_blocks}")
    last = max(len(lengths) - 1, 0)
    table = np.array(blocks + [(last, 0, 0)] * (num_blocks - len(blocks)), np.int32).reshape(-1, 3)
    sequence, index, end = (jnp.asarray(column) for column in table.T)
    return Chunks(sequence, index, jnp.zeros_like(index), end, len(lengths))
