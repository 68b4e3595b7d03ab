"""Every op's result at every token, in two phases; and the first op at which they part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from isojax.layouts import CHUNK
from isojax.rl.parity import Mismatch
from isojax.sampling import Sampling
from isojax.scoring import score_rows
from isojax.verify.phases import Phases
from pallas_kernels.binding import Ops
from qwen35_moe import Qwen35Moe, whole_sequences

# Results that are no rows of the step: weights, plans, states, and the rows of experts, which moe_combine gathers.
_NOT_ROWS = {
    *("cast", "fork", "gather_rows", "gdn_close", "gdn_slots", "grouped_linear", "keep", "logprobs_all", "router"),
    *("sample", "split", "sum_tokens", "swiglu", "swiglu_fused"),
}
_PHASES = {  # One function in two phases has one name.
    "attention_chunks": "attention.core",
    "attention_decode": "attention.core",
    "causal_conv_chunks": "causal_conv",
    "causal_conv_decode": "causal_conv",
    "gdn_chunks": "gdn.core",
    "gdn_decode": "gdn.core",
}

type Key = tuple[int, str, int]
"""Layer, op, and the how manieth call of the op in its layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Where two traces part: ops in program order, then tokens in order."""

    op: str
    layer: int
    token: int
    elements: int
    width: int

    def __str__(self) -> str:
        return f"{self.op}, layer {self.layer}, token {self.token} ({self.elements} of {self.width} elements)"


class Trace:
    """What the ops of one phase computed for the tokens of one sequence."""

    def __init__(self, length: int):
        self.values: dict[Key, np.ndarray] = {}
        self._seen: dict[Key, np.ndarray] = {}
        self._length, self._position = length, np.zeros(0, np.int32)
        self._calls: dict[tuple[int, str, int], int] = {}
        self._residuals = 0

    def record(self, ops: Ops) -> Ops:
        """The same ops, whose results go into this trace when the program runs."""
        names = [f.name for f in dataclasses.fields(ops) if callable(getattr(ops, f.name))]
        return dataclasses.replace(ops, **{n: self._recording(n, getattr(ops, n)) for n in names if n not in _NOT_ROWS})

    def begin(self, positions: Int32[np.ndarray, " rows"]) -> None:
        """Names the rows of the program that runs next; -1 where no token is."""
        jax.effects_barrier()
        self._position, self._residuals = positions, 0
        self._calls.clear()

    def first_difference(self, other: "Trace") -> Difference | None:
        """The first op, then the first token, whose bits are not those of `other`."""
        jax.effects_barrier()
        for key, mine in self.values.items():
            theirs = other.values.get(key)
            if theirs is None or theirs.shape != mine.shape:
                continue
            both = self._seen[key] & other._seen[key]
            apart = (mine.view(np.uint8) != theirs.view(np.uint8)).reshape(*mine.shape, -1).any(-1) & both[:, None]
            if apart.any():
                token = int(np.flatnonzero(apart.any(1))[0])
                return Difference(key[1], key[0], token, int(apart[token].sum()), mine.shape[1])
        return None

    def _recording(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def recorded(*args, **kwargs):
            out = op(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, jax.Array):
                jax.debug.callback(functools.partial(self._take, name), first, ordered=True)
            return out

        return recorded

    def _take(self, name: str, out: jax.Array | np.ndarray) -> None:
        layer = self._residuals // 2
        self._residuals += name == "residual_add"
        out, rows = np.asarray(out), len(self._position)
        if out.ndim > 1 and out.shape[1] == CHUNK and out.shape[0] == rows // CHUNK:
            out = out.reshape(-1, *out.shape[2:])
        # A program's rows are decode rows, then blocks of 64; an op sees one part or all.
        part = {rows: slice(None), rows % CHUNK: slice(rows % CHUNK), rows // CHUNK * CHUNK: slice(rows % CHUNK, None)}
        if len(out) not in part:
            return
        positions, calls = self._position[part[len(out)]], (layer, name, len(out))
        key = layer, _PHASES.get(name, name), self._calls.get(calls, 0)
        self._calls[calls] = key[2] + 1
        out = np.ascontiguousarray(out.reshape(len(out), -1))
        values = self.values.setdefault(key, np.zeros((self._length, out.shape[1]), out.dtype))
        seen = self._seen.setdefault(key, np.zeros(self._length, bool))
        there = positions >= 0
        values[positions[there]], seen[positions[there]] = out[there], True


def trainer_trace(
    model: Qwen35Moe, tokens: Int32[np.ndarray, " length"], sampling: Sampling
) -> tuple[Trace, np.ndarray]:
    """The trainer's forward over one sequence: its trace, and the score of every token but the first."""
    length = len(tokens) - 1
    trace, chunks = Trace(length), whole_sequences([length])
    rows = len(chunks.index) * CHUNK
    ids = np.zeros((2, rows), np.int32)
    ids[:, :length] = tokens[:-1], tokens[1:]
    ops = trace.record(model.ops)
    positions = np.where(np.arange(rows) < length, np.arange(rows, dtype=np.int32), -1)
    trace.begin(positions)

    @jax.jit
    def run(params, tokens, targets):
        return score_rows(Qwen35Moe(model.config, params, ops), tokens, targets, chunks, sampling)[0]

    scores = run(model.params(), *ids)
    return trace, np.asarray(scores)[:length]


def rollout_trace(
    model: Qwen35Moe, tokens: Int32[np.ndarray, " length"], prompt: int, cached: int, sampling: Sampling
) -> tuple[Trace, np.ndarray]:
    """Prefill of `cached` tokens, of the rest of the prompt, then decode: trace and scores as `trainer_trace`."""
    length = len(tokens) - 1
    trace = Trace(length)
    phases = Phases(model, sequences=1, max_len=length, ops=trace.record(model.ops))
    pieces = [n for n in (cached, min(prompt, length) - cached) if n > 0]
    steps = [{0: count} for count in pieces + [1] * (length - sum(pieces))]
    *_, scores = phases.trace([tokens], steps, sampling, before=lambda where: trace.begin(where[:, 1]))
    return trace, scores[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What replaying a mismatch by hand showed.

    Attributes:
        difference: The first op at which the two phases part, if they do.
        reproduced: Whether the replay has the recorded bits of (the rollout, the trainer).
        cached: Tokens of the rollout's prefix hit.
        version: Of the weights that sampled the token.
    """

    difference: Difference | None
    reproduced: tuple[bool, bool]
    cached: int
    version: int

    def __str__(self) -> str:
        found = f"first differing op: {self.difference}" if self.difference else "replayed by hand, all ops agree"
        sides = [side for side, again in zip(("rollout", "trainer"), self.reproduced, strict=True) if not again]
        lost = (
            f"; the {' and the '.join(sides)} cannot be reproduced: suspect scheduling, cache or weights"
            if sides
            else ""
        )
        hit = f"prefix hit {self.cached} tokens" if self.cached else "no prefix hit"
        return f"{found}; rollout: {hit}; weights v{self.version} on both sides{lost}"


def explain(model: Qwen35Moe, mismatch: Mismatch) -> Explanation:
    """Runs the first sequence of a mismatch in both phases again, op by op."""
    sample, output = mismatch.first
    tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
    prompt = len(sample.prompt_tokens)
    trainer, trainer_scores = trainer_trace(model, tokens, mismatch.sampling)
    rollout, rollout_scores = rollout_trace(model, tokens, prompt, sample.cached, mismatch.sampling)
    recorded = ((rollout_scores, sample.logprobs), (trainer_scores, mismatch.trainer[0]))
    reproduced = tuple(_same(scores[prompt - 1 :], values) for scores, values in recorded)
    return Explanation(rollout.first_difference(trainer), reproduced, sample.cached, int(sample.versions[output]))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.astype(np.float32).tobytes() == b.astype(np.float32).tobytes()
