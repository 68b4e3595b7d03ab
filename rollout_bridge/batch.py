"""From scheduled pieces of sequences to programs of a few fixed shapes.

A scheduler step is any mixture of decode rows and prefill pieces. Bits do not depend on how it is cut
into programs, so a step that fits no shape runs as several programs one after another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from isojax.layouts import CHUNK, round_up
from isojax.pytrees import pytree


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of one sequence from position `start` on; `fresh` as in `requests.Request`.

    `state_in` and `state_out` are indices into the sequence's block table: the page that holds the Gated
    DeltaNet state before the piece, and the page that takes it.
    """

    slot: int
    start: int
    count: int
    fresh: bool
    samples: bool
    state_in: int
    state_out: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_row(self) -> bool:
        """Whether the piece may run as a decode row: the slot of a fresh one must be rebuilt by the chunk path."""
        return self.count == 1 and not self.fresh

    @property
    def num_chunks(self) -> int:
        return (self.end - 1) // CHUNK - self.start // CHUNK + 1

    def split(self, chunks: int) -> tuple["Piece", "Piece"]:
        """The first `chunks` chunks, and the rest, which goes on from the state page the first part wrote."""
        count = (self.start // CHUNK + chunks) * CHUNK - self.start
        head = dataclasses.replace(self, count=count, samples=False)
        rest = dataclasses.replace(
            self, start=self.start + count, count=self.count - count, fresh=False, state_in=self.state_out
        )
        return head, rest


def piece(*, slot: int, start: int, count: int, fresh: bool, samples: bool, state_block: int) -> Piece:
    """A piece whose state pages follow vLLM's rule: read where the token before it lies, write where its last one lies.

    Args:
        state_block: Tokens of one state page.
    """
    return Piece(
        slot, start, count, fresh, samples, max(start - 1, 0) // state_block, (start + count - 1) // state_block
    )


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes that programs are compiled for.

    Attributes:
        decode: Numbers of decode rows of a program without chunks, ascending; the last holds every request.
        chunks: Numbers of chunk blocks of a program with chunks, ascending. Such a program also has room for
            `decode[-1]` decode rows, so that a mixed step reads the weights once.
    """

    decode: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int, growth: int = 2) -> "Buckets":
        """Sizes from 8 rows and 4 chunks up to what one scheduler step can hold.

        Args:
            max_num_seqs: Most decode rows of a step.
            max_num_batched_tokens: Most tokens of a step.
            growth: From a size to the next: a larger one compiles fewer programs and pads more.
        """
        # Pieces that start or end inside a chunk need more blocks than tokens/64; two more cover the usual step.
        most_chunks = -(-max_num_batched_tokens // CHUNK) + 2
        return cls(_sizes(8, round_up(max_num_seqs, 8), growth), _sizes(4, most_chunks, growth))

    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (decode rows, chunk blocks) that a program is compiled for."""
        return tuple((rows, 0) for rows in self.decode) + tuple((self.decode[-1], count) for count in self.chunks)


def _sizes(first: int, last: int, growth: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * growth, last))
    return tuple(sizes)


def passes(pieces: Sequence[Piece], buckets: Buckets) -> list[tuple[list[Piece], list[Piece]]]:
    """Cuts a step into programs: (decode rows, chunk pieces) of each.

    Chunk pieces are taken in order and cut at a chunk where a program is full; all decode rows run in the last program.
    """
    rows = [p for p in pieces if p.is_row]
    most = buckets.chunks[-1]
    programs: list[list[Piece]] = []
    current: list[Piece] = []
    room = most
    for rest in (p for p in pieces if not p.is_row):
        while rest.num_chunks > room:
            if room:
                head, rest = rest.split(room)
                current.append(head)
            programs.append(current)
            current, room = [], most
        current.append(rest)
        room -= rest.num_chunks
    return [([], chunk_pieces) for chunk_pieces in programs] + [(rows, current)]


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Where the sequences of one program live, one entry a decode row or chunk sequence, padded.

    Attributes:
        start: Tokens computed before.
        slot: Slot; `num_slots`, which is nowhere, for padding.
        to: Where the last hidden row goes: the slot when a token is sampled from it, else nowhere.
        fresh: Whether the slot is to be rebuilt from the page.
        pages: Pages of K and V.
        state_in: For every state group, the page that the state is read from.
        state_out: The page that it is written to; `num_blocks`, which is nowhere, for padding.
    """

    start: Shaped[Any, " sequences"]
    slot: Shaped[Any, " sequences"]
    to: Shaped[Any, " sequences"]
    fresh: Shaped[Any, " sequences"]
    pages: Shaped[Any, "sequences pages"]
    state_in: Shaped[Any, "groups sequences"]
    state_out: Shaped[Any, "groups sequences"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """One program's inputs, on the host, padded to a bucket.

    Attributes:
        rows: Decode rows.
        valid: Which of them are there.
        sequences: Chunk sequences; as many as blocks.
        blocks: Sequence, chunk index, begin and end of every chunk block.
        last: Row of each chunk sequence's last token, among the chunk rows.
    """

    rows: Homes
    valid: Shaped[Any, " rows"]
    sequences: Homes
    blocks: Shaped[Any, "4 blocks"]
    last: Shaped[Any, " blocks"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """Block tables of all slots, `[slots, blocks]`: of the attention group and of every state group."""

    pages: np.ndarray
    states: Sequence[np.ndarray]
    num_blocks: int

    @property
    def num_slots(self) -> int:
        return len(self.pages)

    def homes(self, pieces: Sequence[Piece], size: int) -> Homes:
        """Where `pieces` live, padded to `size`."""
        count = len(pieces)
        padded = lambda values, fill, dtype=np.int32: np.array(list(values) + [fill] * (size - count), dtype)  # noqa: E731
        slots = np.array([p.slot for p in pieces], np.int32)
        pages = np.zeros((size, self.pages.shape[1]), np.int32)
        pages[:count] = self.pages[slots]
        state_in = np.zeros((len(self.states), size), np.int32)
        state_out = np.full((len(self.states), size), self.num_blocks, np.int32)
        for group, table in enumerate(self.states):
            state_in[group, :count] = table[slots, [p.state_in for p in pieces]]
            state_out[group, :count] = table[slots, [p.state_out for p in pieces]]
        return Homes(
            start=padded((p.start for p in pieces), 0),
            slot=padded(slots, self.num_slots),
            to=padded((p.slot if p.samples else self.num_slots for p in pieces), self.num_slots),
            fresh=padded((p.fresh for p in pieces), False, bool),
            pages=pages,
            state_in=state_in,
            state_out=state_out,
        )


def pack(rows: Sequence[Piece], chunk_pieces: Sequence[Piece], tables: Tables, buckets: Buckets) -> Inputs:
    """Inputs of one program, in the smallest bucket that holds the pieces."""
    count = sum(p.num_chunks for p in chunk_pieces)
    num_blocks = next(size for size in buckets.chunks if size >= count) if count else 0
    num_rows = buckets.decode[-1] if count else next(size for size in buckets.decode if size >= len(rows))
    blocks = np.zeros((4, num_blocks), np.int32)
    last = np.zeros(num_blocks, np.int32)
    at = 0
    for i, p in enumerate(chunk_pieces):
        for index in range(p.start // CHUNK, (p.end - 1) // CHUNK + 1):
            begin, end = max(p.start - index * CHUNK, 0), min(p.end - index * CHUNK, CHUNK)
            blocks[:, at] = i, index, begin, end
            last[i] = at * CHUNK + end - 1
            at += 1
    return Inputs(
        rows=tables.homes(rows, num_rows),
        valid=np.arange(num_rows) < len(rows),
        sequences=tables.homes(chunk_pieces, num_blocks),
        blocks=blocks,
        last=last,
    )


def empty(num_rows: int, num_blocks: int, tables: Tables) -> Inputs:
    """Inputs of a bucket in which nothing is there: for compiling its program."""
    return Inputs(
        rows=tables.homes([], num_rows),
        valid=np.zeros(num_rows, bool),
        sequences=tables.homes([], num_blocks),
        blocks=np.zeros((4, num_blocks), np.int32),
        last=np.zeros(num_blocks, np.int32),
    )
