"""Which rows a forward gets: the blocks of 64 rows and the decode rows of a step (docs/architecture.md)."""

import dataclasses

from jaxtyping import Array, Bool, Int32

from isojax.pytrees import pytree


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """The 64-row blocks of a step: each is one absolute 64-token chunk of one sequence.

    Row r of block i is position 64·`index[i]` + r of sequence `sequence[i]`, and is there when
    `begin[i]` <= r < `end[i]`; the other rows may hold anything. The blocks of one sequence are
    consecutive, chunks ascending without gaps. Padding blocks have `begin == end == 0`.

    Attributes:
        sequence: Which of the step's chunk sequences each block belongs to.
        index: Which chunk of its sequence each block is.
        begin: First row that is there.
        end: One past the last row that is there.
        num_sequences: Number of chunk sequences of the step; some may have no block.
    """

    sequence: Int32[Array, " blocks"]
    index: Int32[Array, " blocks"]
    begin: Int32[Array, " blocks"]
    end: Int32[Array, " blocks"]
    num_sequences: int = dataclasses.field(metadata={"static": True})


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """The decode rows of a step: one token of one sequence each.

    Attributes:
        position: Absolute position of each row in its sequence.
        valid: Whether the row is there; the others are padding and may hold anything.
    """

    position: Int32[Array, " rows"]
    valid: Bool[Array, " rows"]
