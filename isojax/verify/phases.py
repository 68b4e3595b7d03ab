"""The model's phases by hand: the programs that the engine compiles, without its scheduler."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from isojax.layouts import CHUNK, round_up
from isojax.sampling import Sampling
from isojax.scoring import score_hidden
from pallas_kernels.binding import Ops
from qwen35_moe import Placement, Qwen35Moe, page_tokens, rollout_params, tie
from rollout_bridge.batch import Buckets, Piece, Tables, pack, passes, piece
from rollout_bridge.cache import Layout
from rollout_bridge.programs import Programs

type Step = Mapping[int, int]
"""Tokens that each sequence advances by in one scheduler step."""

_GROUPS = 4  # One group of attention layers, three of Gated DeltaNet.


class Phases:
    """Prefill and decode of a few sequences at once, cut as one likes.

    Args:
        model: The policy.
        sequences: Most sequences at once.
        max_len: Tokens of the longest.
        ops: Other ops than the model's, e.g. recording ones.
    """

    def __init__(self, model: Qwen35Moe, *, sequences: int, max_len: int, ops: Ops | None = None):
        config, self.ops = model.config, ops or model.ops
        pages = -(-max_len // page_tokens(config))
        layout = Layout(
            num_blocks=1 + sequences * _GROUPS * pages,
            page_tokens=page_tokens(config),
            state_block=page_tokens(config),
            attention_group=0,
            state_groups=(1, 2, 3),
            placement=Placement.by_period(config),
        )
        own = 1 + np.arange(sequences * _GROUPS * pages, dtype=np.int32).reshape(_GROUPS, sequences, pages)
        self._tables = Tables(own[0], list(own[1:]), layout.num_blocks)
        self._programs = Programs(config, self.ops, layout, num_slots=sequences, max_len=max_len)
        # Few shapes: what does not fit in one program runs as several.
        self._buckets = Buckets(decode=tuple(sorted({8, round_up(sequences, 8)})), chunks=(4, 16))
        self._params = rollout_params(model.params(), config, model.ops)
        self._score = jax.jit(self._scored, static_argnums=3)

    def run(
        self, tokens: Sequence[Int32[np.ndarray, " _"]], steps: Iterable[Step], sampling: Sampling = Sampling()
    ) -> list[Float[np.ndarray, " _"]]:
        """Advances sequences step by step; value t of a sequence scores its token t + 1.

        Args:
            tokens: Every sequence; its last token is scored, not run.
            steps: Together they advance every sequence by all tokens but the last.
            sampling: How to score.
        """
        *_, scores = self.trace(tokens, steps, sampling)
        return scores

    def trace(
        self,
        tokens: Sequence[np.ndarray],
        steps: Iterable[Step],
        sampling: Sampling,
        before: Callable[[np.ndarray], None] = lambda where: None,
    ) -> Iterator[list[np.ndarray]]:
        """As `run`, yielding the scores so far after every program.

        Args:
            before: Called before every program with the (sequence, position) of each of its rows.
        """
        state = self._programs.fresh_state()
        for slot, ids in enumerate(tokens):
            state = self._programs.write_tokens(state, slot, ids[:-1])
        scores = [np.full(len(ids) - 1, np.nan, np.float32) for ids in tokens]
        done = [0] * len(tokens)
        for step in steps:
            pieces = [self._piece(slot, done[slot], count) for slot, count in step.items()]
            for slot, count in step.items():
                done[slot] += count
            for rows, chunks in passes(pieces, self._buckets):
                inputs = pack(rows, chunks, self._tables, self._buckets)
                where = _where(rows, chunks, len(inputs.valid), len(inputs.valid) + CHUNK * inputs.blocks.shape[1])
                before(where)
                state, hidden = self._programs.forward(self._params, state, inputs)
                targets = np.array([tokens[s][p + 1] if s >= 0 else 0 for s, p in where], np.int32)
                values = np.asarray(self._score(self._params, hidden, jnp.asarray(targets), sampling))
                for (s, p), value in zip(where, values, strict=True):
                    if s >= 0:
                        scores[s][p] = value
                yield scores

    def _piece(self, slot: int, start: int, count: int) -> Piece:
        block = self._programs.layout.state_block
        return piece(slot=slot, start=start, count=count, fresh=start == 0, samples=False, state_block=block)

    def _scored(self, params, hidden, targets, sampling: Sampling):
        config = self._programs.config
        return score_hidden(tie(params, config, self.ops), hidden, targets, config, self.ops, sampling)[0]


def _where(rows: Sequence[Piece], chunks: Sequence[Piece], num_rows: int, total: int) -> Int32[np.ndarray, "rows 2"]:
    """Slot and position of every hidden row; -1 where none is."""
    where = np.full((total, 2), -1, np.int32)
    for row, p in enumerate(rows):
        where[row] = p.slot, p.start
    at = num_rows
    for p in chunks:
        for position in range(p.start, p.end):
            where[at + position - p.start // CHUNK * CHUNK] = p.slot, position
        at += p.num_chunks * CHUNK
    return where


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to cut sequences into steps.

    Attributes:
        name: For people.
        prompts: Tokens of each sequence that come as prompt; the others are decoded one by one.
        piece: Tokens that a sequence advances by in a step at most.
        budget: Tokens of a step at most, decode rows first; prompts are cut to it.
        mates: Sequences that run at once; the next begins when one ends.
    """

    name: str
    prompts: int = 1 << 30
    piece: int = 1 << 30
    budget: int = 1 << 30
    mates: int = 1 << 30

    def steps(self, lengths: Sequence[int]) -> Iterable[dict[int, int]]:
        """The steps, as a scheduler with this budget would make them."""
        done, waiting, running = [0] * len(lengths), list(range(len(lengths))), []
        while waiting or running:
            while waiting and len(running) < self.mates:
                running.append(waiting.pop(0))
            room, step = self.budget, {}
            decoding = [s for s in running if done[s] >= min(self.prompts, lengths[s])]
            for s in decoding + [s for s in running if s not in decoding]:
                left = 1 if s in decoding else min(self.prompts, lengths[s]) - done[s]
                if count := min(left, room, self.piece):
                    step[s], room = count, room - count
            for s, count in step.items():
                done[s] += count
            running = [s for s in running if done[s] < lengths[s]]
            yield step
