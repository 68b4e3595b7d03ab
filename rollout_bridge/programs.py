"""The compiled programs of an engine: forward over a bucket, sampling, scoring, moving pages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int32

import qwen35_moe
from isojax.layouts import CHUNK
from isojax.pytrees import pytree
from pallas_kernels.binding import Ops
from pallas_kernels.logprob import top_logprobs
from pallas_kernels.ordering import ordered
from pallas_kernels.sample import edit_logits, reported, sample_key
from pallas_kernels.sample import sample as draw
from pallas_kernels.step import Chunks, Decode
from qwen35_moe.cache import Cache, init_cache
from qwen35_moe.config import Config
from qwen35_moe.step import Residency, Step
from rollout_bridge import pages
from rollout_bridge.batch import Buckets, Homes, Inputs, Tables, empty
from rollout_bridge.cache import Layout
from rollout_bridge.device import on_device
from rollout_bridge.sampling import Controls, Edits, no_controls


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What programs change in place.

    Attributes:
        cache: The model's pages and slots.
        tokens: Tokens of every slot, `[slots, max_model_len + 1]`.
        hidden: Of every slot, the last hidden row that a token is sampled from.
    """

    cache: Cache
    tokens: Int32[Array, "slots length"]
    hidden: jax.Array


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Scored tokens: the drawn or given one, then the likeliest; ranks count from 1."""

    tokens: Int32[Array, "rows most"]
    logprobs: Float32[Array, "rows most"]
    ranks: Int32[Array, " rows"]

    def on_host(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first `count` rows as NumPy arrays; waits for the device."""
        return tuple(np.asarray(x)[:count] for x in (self.tokens, self.logprobs, self.ranks))


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs of one model over one cache layout; `shared` gives engines of one process the same ones.

    Attributes:
        config: The model's sizes.
        ops: The bound ops.
        layout: Where layers lie.
        num_slots: Requests that can run at once.
        max_len: Longest sequence.
        engine_seed: What tokens of requests without a seed are drawn from.
    """

    config: Config
    ops: Ops
    layout: Layout
    num_slots: int
    max_len: int
    engine_seed: int = 0

    @classmethod
    @functools.lru_cache(maxsize=8)
    def shared(cls, config: Config, ops: Ops, layout: Layout, **settings: int) -> "Programs":
        """Programs that were made, and compiled, before with these arguments, or new ones."""
        return cls(config, ops, layout, **settings)

    @property
    def pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_len // self.layout.page_tokens)

    @property
    def blocks_per_request(self) -> list[int]:
        """Entries of a request's block table, for every KV-cache group of vLLM."""
        pages = self.pages
        states = -(-self.max_len // self.layout.state_block)
        groups = 1 + len(self.layout.state_groups)
        return [pages if group == self.layout.attention_group else states for group in range(groups)]

    def fresh_state(self) -> State:
        """An empty cache and no tokens."""
        cache = init_cache(
            self.config,
            self.layout.placement,
            self.ops,
            num_blocks=self.layout.num_blocks,
            num_slots=self.num_slots,
            tokens=self.layout.page_tokens,
        )
        tokens = jnp.zeros((self.num_slots, self.max_len + 1), jnp.int32)
        hidden = jnp.zeros((self.num_slots, self.config.hidden_size), self.config.compute_dtype)
        return on_device(State(cache, tokens, hidden))

    def idle(self, rows: int, blocks: int) -> tuple[Inputs, Controls]:
        """Inputs of a bucket in which nothing is there: for compiling its programs."""
        nowhere = np.zeros((self.num_slots, self.pages), np.int32)
        tables = Tables(nowhere, [nowhere] * len(self.layout.state_groups), self.layout.num_blocks)
        return empty(rows, blocks, tables), no_controls(rows, self.num_slots)

    def workspace_bytes(self, params: Any, buckets: Buckets) -> int:
        """Bytes that the largest programs take beside weights and cache, as the compiler says."""
        inputs, plain = self.idle(*max(buckets.shapes(), key=lambda shape: shape[0] + CHUNK * shape[1]))
        state = jax.eval_shape(self.fresh_state)
        programs = self._forward.lower(params, state, inputs), self._sample.lower(params, state, plain, None, True, 0)
        sizes = [program.compile().memory_analysis() for program in programs]
        return max(s.temp_size_in_bytes + s.output_size_in_bytes - s.alias_size_in_bytes for s in sizes)

    def forward(self, params: Any, state: State, inputs: Inputs) -> tuple[State, jax.Array]:
        """Runs decode rows and chunk blocks; returns the hidden rows too."""
        return self._forward(params, state, inputs)

    @functools.cached_property
    def _forward(self):
        @functools.partial(jax.jit, donate_argnums=1)
        def forward(params, state: State, inputs: Inputs):
            rows, sequences = inputs.rows, inputs.sequences
            num_rows, num_blocks = len(inputs.valid), inputs.blocks.shape[1]
            tokens = [_at(state.tokens, rows.slot, rows.start)]
            chunks = None
            if num_blocks:
                chunks = Chunks(*inputs.blocks, num_sequences=num_blocks)
                position = chunks.index[:, None] * CHUNK + jnp.arange(CHUNK)
                tokens.append(_at(state.tokens, sequences.slot[chunks.sequence][:, None], position).reshape(-1))
            hidden, cache, _ = qwen35_moe.forward(
                params,
                Step(jnp.concatenate(tokens), Decode(rows.start, inputs.valid), chunks),
                self.config,
                self.ops,
                cache=state.cache,
                decode_at=_residency(rows),
                chunks_at=_residency(sequences) if num_blocks else None,
                max_positions=self.max_len,
            )
            last = hidden[:num_rows]
            to = rows.to
            if num_blocks:
                last = jnp.concatenate([last, hidden[num_rows + inputs.last]])
                to = jnp.concatenate([to, sequences.to])
            return State(cache, state.tokens, state.hidden.at[to].set(last, mode="drop")), hidden

        return forward

    def sample(
        self, params: Any, state: State, controls: Controls, edits: Edits | None, *, filtered: bool, most_likely: int
    ) -> tuple[State, Scores]:
        """Draws one token for every row and writes it to the token buffer.

        Args:
            filtered: Whether any row uses top_k, top_p or min_p.
            most_likely: Likeliest tokens to score beside the drawn one.
        """
        return self._sample(params, state, controls, edits, filtered, most_likely)

    @functools.cached_property
    def _sample(self):
        @functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=1)
        def sample(params, state: State, controls: Controls, edits: Edits | None, filtered: bool, most_likely: int):
            logits = self._logits(params, state.hidden.at[controls.slot].get(mode="clip"))
            if edits is not None:
                logits = edit_logits(logits, edits.tokens, edits.add, edits.only)
            temperature, keep = reported(controls.temperature), None
            if filtered:
                keep = self.ops.truncation_mask(
                    logits,
                    temperature=temperature,
                    top_k=controls.top_k,
                    top_p=controls.top_p,
                    min_p=controls.min_p,
                    vocab=self.config.num_words,
                )
            keys = sample_key(
                self.engine_seed,
                controls.update,
                controls.request,
                controls.sample,
                controls.position,
                user_seed=controls.seed,
                has_user_seed=controls.seeded,
            )
            drawn = draw(logits, keys, controls.temperature, keep, vocab=self.config.num_words)
            scores = self._scored(logits, drawn, temperature, keep, most_likely)
            slot = jnp.where(controls.samples, controls.slot, self.num_slots)
            tokens = state.tokens.at[slot, controls.position].set(drawn, mode="drop")
            return State(state.cache, tokens, state.hidden), scores

        return sample

    def score(
        self,
        params: Any,
        state: State,
        hidden: jax.Array,
        row: int,
        slot: int,
        position: int,
        temperature: float,
        *,
        most_likely: int,
    ) -> Scores:
        """Scores the tokens after 64 hidden rows from `row` on, which are positions from `position` on of `slot`."""
        where = np.array([row, slot, position], np.int32)
        return self._score(params, state.tokens, hidden, where, np.float32(temperature), most_likely)

    @functools.cached_property
    def _score(self):
        @functools.partial(jax.jit, static_argnums=5)
        def score(params, tokens, hidden, where, temperature, most_likely: int):
            row, slot, position = where
            offsets = jnp.arange(CHUNK)
            logits = self._logits(params, hidden.at[row + offsets].get(mode="clip"))
            targets = _at(tokens, slot, position + 1 + offsets)
            return self._scored(logits, targets, jnp.full(CHUNK, temperature), None, most_likely)

        return score

    def _logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        return qwen35_moe.logits(qwen35_moe.tie(params, self.config, self.ops), hidden, self.config, self.ops)

    def _scored(self, logits, tokens, temperature, keep, most_likely: int) -> Scores:
        settings = {"temperature": temperature, "vocab": self.config.num_words, "keep": keep}
        live = jnp.arange(logits.shape[1]) < self.config.num_words
        live = live if keep is None else live & keep
        order = jnp.where(live, ordered(logits), jnp.iinfo(jnp.int32).min)
        ranks = jnp.sum(order >= jnp.take_along_axis(order, tokens[:, None], axis=1), axis=1, dtype=jnp.int32)
        if not most_likely:
            logprobs, _ = self.ops.logprob(logits, tokens, **settings)
            return Scores(tokens[:, None], logprobs[:, None], ranks)
        logprobs = self.ops.logprobs_all(logits, **settings)  # Each with the bits of `logprob`.
        words, values, _ = top_logprobs(logprobs, tokens, min(most_likely, self.config.num_words))
        return Scores(words, values, ranks)

    def write_tokens(self, state: State, slot: int, tokens: np.ndarray) -> State:
        """Puts the known tokens of a request into its slot."""
        row = np.zeros(self.max_len + 1, np.int32)
        row[: len(tokens)] = tokens
        return dataclasses.replace(state, tokens=_write_row(state.tokens, slot, row))

    def zero_blocks(self, state: State, blocks: Sequence[int]) -> State:
        """`pages.zero` of the state's pools."""
        return _with_pools(state, pages.zero(state.cache.pools, blocks))

    def copy_blocks(self, state: State, copies: Sequence[Any]) -> State:
        """`pages.copy` in the state's pools."""
        return _with_pools(state, pages.copy(state.cache.pools, copies))


def _with_pools(state: State, pools: pages.Pools) -> State:
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, pools=pools))


def _at(tokens: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    return tokens.at[slot, position].get(mode="clip")


def _residency(homes: Homes) -> Residency:
    return Residency(
        start=homes.start,
        fresh=homes.fresh,
        slot=homes.slot,
        kv_pages=homes.pages,
        state_in=homes.state_in,
        state_out=homes.state_out,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _write_row(tokens: jax.Array, slot: ArrayLike, row: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(tokens, row[None], (slot, 0))
