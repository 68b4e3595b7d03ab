"""The programs of the tiny models, with shapes to trace them at: nothing is computed."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from isojax.layouts import Segments
from isojax.rl import gradient
from isojax.rl.losses import grpo_loss
from isojax.sampling import Sampling
from isojax.verify.direct import as_batch
from pallas_kernels.binding import Ops
from pallas_kernels.router import load_balancing_loss
from qwen35_moe import (
    Decode,
    Placement,
    Qwen35Moe,
    Residency,
    Step,
    forward,
    init_cache,
    logits,
    page_tokens,
    param_shapes,
    tie,
    whole_sequences,
)
from tests.qwen35_moe.tiny import config, dense_config

LENGTHS = [72, 40]


class Program(NamedTuple):
    """A function and what it is traced at."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Programs:
    """The programs of one period of a tiny model over some ops."""

    def __init__(self, kind: str, dtype: str, ops: Ops):
        whole = config(dtype) if kind == "experts" else dense_config(dtype)
        self.config, self.ops = dataclasses.replace(whole, num_hidden_layers=4), ops
        shapes = param_shapes(self.config)
        self.params = jax.tree.map(_float32, shapes, is_leaf=lambda node: isinstance(node, tuple))
        chunks = whole_sequences(LENGTHS)
        self.step = Step(jnp.zeros(64 * len(chunks.index), jnp.int32), None, chunks)
        self.targets = jnp.zeros_like(self.step.tokens)

    def score(self) -> Program:
        """Log-probabilities of packed sequences."""

        def score(params, step, targets):
            params = tie(params, self.config, self.ops)
            hidden, _, _ = forward(params, step, self.config, self.ops, max_positions=128)
            return self.ops.logprob(logits(params, hidden, self.config, self.ops), targets, temperature=0.7)

        return Program(score, (self.params, self.step, self.targets))

    def gradient(self) -> Program:
        """The gradient of a cross-entropy and of the load-balancing loss, weighted by the cotangents."""
        cfg, ops = self.config, self.ops

        def losses(params, step, targets, counts):
            params = tie(params, cfg, ops)
            hidden, _, routed = forward(params, step, cfg, ops, max_positions=128, remat=True)
            scores = logits(params, hidden, cfg, ops, segments=step.segments)
            logprob, _ = ops.logprob(scores, jnp.maximum(targets, 0), temperature=1.0)
            sums = [ops.sum_tokens(jnp.where(targets >= 0, logprob, 0.0), step.segments)]
            for router_logits, _ in routed or ():  # [periods, rows, experts]: read once, so that no cotangents meet.
                periods = router_logits.shape[0]
                rows, valid = router_logits.reshape(-1, cfg.num_experts), jnp.tile(step.valid, periods)
                terms = load_balancing_loss(rows, valid, counts, top_k=cfg.num_experts_per_tok)
                segments = Segments(jnp.tile(step.segments.sequence, periods), step.segments.count)
                sums.append(ops.sum_tokens(terms, segments))
            return sums

        def gradient(params, step, targets, counts, weights):
            return jax.vjp(lambda params: losses(params, step, targets, counts), params)[1](weights)

        counts, weights = jnp.zeros(8, jnp.int32), [jnp.float32(1)] * (5 if cfg.is_moe else 1)
        return Program(gradient, (self.params, self.step, self.targets, counts, weights))

    def trainer(self) -> Program:
        """A micro-batch of `policy_gradient`, with the clipped loss."""
        batch = as_batch([np.zeros(length, np.int32) for length in LENGTHS])
        (micro,) = batch.micro_batches
        rows = gradient._device_rows(batch, micro)
        split = nnx.split(Qwen35Moe(self.config, self.params, self.ops), nnx.Param, ...)
        loss = gradient._Loss.of(grpo_loss)
        return Program(gradient._micro_gradient, (*split, rows, loss, Sampling(temperature=0.9), micro.count, True))

    def prefill(self) -> Program:
        """Two pieces of prompts."""
        return self._cached(0)

    def decode(self) -> Program:
        """One token of each of three requests."""
        return self._cached(3, prefill=False)

    def mixed(self) -> Program:
        """Decode rows before pieces of prompts."""
        return self._cached(3)

    def _cached(self, decode_rows: int, *, prefill: bool = True) -> Program:
        placement = Placement.by_period(self.config)
        sizes = {"num_blocks": 9, "num_slots": 4, "tokens": page_tokens(self.config)}
        cache = jax.eval_shape(lambda: init_cache(self.config, placement, self.ops, **sizes))
        decode = Decode(jnp.zeros(decode_rows, jnp.int32), jnp.zeros(decode_rows, bool)) if decode_rows else None
        chunks = self.step.chunks if prefill else None
        rows = decode_rows + (len(self.step.tokens) if prefill else 0)
        step = Step(jnp.zeros(rows, jnp.int32), decode, chunks)

        def serve(params, step, cache, decode_at, chunks_at):
            at = {"cache": cache, "decode_at": decode_at, "chunks_at": chunks_at}
            hidden, cache, _ = forward(params, step, self.config, self.ops, max_positions=512, **at)
            return logits(tie(params, self.config, self.ops), hidden, self.config, self.ops), cache

        at = (_residency(decode_rows) if decode_rows else None, _residency(len(LENGTHS)) if prefill else None)
        return Program(serve, (self.params, step, cache, *at))


PROGRAMS = ("score", "gradient", "trainer", "prefill", "decode", "mixed")


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _residency(sequences: int) -> Residency:
    zeros = jnp.zeros(sequences, jnp.int32)
    groups = jnp.zeros((3, sequences), jnp.int32)
    return Residency(zeros, jnp.zeros(sequences, bool), zeros, jnp.zeros((sequences, 2), jnp.int32), groups, groups)
