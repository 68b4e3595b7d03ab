"""The cache of a rollout: pages that vLLM manages, and the per-request state of open chunks."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt

from isojax.layouts import CHUNK, round_up
from isojax.pytrees import pytree
from pallas_kernels.binding import Ops
from qwen35_moe.config import PERIOD, Config

_WORDS = {"bfloat16": jnp.uint16, "float32": jnp.uint32}


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Which pool and which group of pages each layer uses.

    Layers of different groups share a pool: a page belongs to one group at a time.

    Attributes:
        state: For every Gated DeltaNet layer, in model order, its pool and its group of state pages.
        kv: For every attention layer, in model order, its pool.
    """

    state: tuple[tuple[int, int], ...]
    kv: tuple[int, ...]

    @classmethod
    def by_period(cls, config: Config) -> "Placement":
        """One pool for each period, one group for each of its Gated DeltaNet layers."""
        groups = PERIOD - 1
        state = tuple((period, group) for period in range(config.periods) for group in range(groups))
        return cls(state, tuple(range(config.periods)))

    @property
    def num_pools(self) -> int:
        """Number of pools."""
        return 1 + max([*self.kv, *(pool for pool, _ in self.state)])


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """State of the running requests in one Gated DeltaNet layer, one leading row a request.

    Attributes:
        delta: What the bound `gdn_decode` keeps between tokens; a pytree that only the ops look into.
        window: The last three inputs of the convolution.
    """

    delta: Any
    window: Float[Array, "slots 3 channels"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """All state of a rollout. Float contents move as integers: half of a float32 can look like a bfloat16 NaN.

    Attributes:
        pools: For every pool, its pages as words of the compute dtype's width.
        slots: For every Gated DeltaNet layer, the state of the running requests.
        placement: Pools and groups of the layers.
    """

    pools: tuple[UInt[Array, "num_blocks words"], ...]
    slots: tuple[Slots, ...]
    placement: Placement = dataclasses.field(metadata={"static": True})


def page_tokens(config: Config) -> int:
    """Tokens of a page: the least multiple of 64 whose keys and values take the room of a state page."""
    state_words = _state_words(config) + _window_words(config)
    return round_up(-(-state_words // (2 * config.kv_dim)), CHUNK)


def init_cache(
    config: Config, placement: Placement, ops: Ops, *, num_blocks: int, num_slots: int, tokens: int
) -> Cache:
    """An empty cache.

    Args:
        config: The model's sizes.
        placement: Pools and groups of its layers.
        ops: The bound ops, whose Gated DeltaNet says what a slot holds.
        num_blocks: Pages of each pool.
        num_slots: Requests that can run at once.
        tokens: Tokens of a page, a multiple of 64 and at least `page_tokens(config)`.

    Raises:
        ValueError: If pages are too small or not a multiple of 64 tokens.
    """
    if tokens % CHUNK or tokens < page_tokens(config):
        raise ValueError(
            f"pages of {tokens} tokens: need a multiple of {CHUNK} from {page_tokens(config)} on,"
            " so that a page holds a Gated DeltaNet state and ends on the chunk grid"
        )
    dtype, word = jnp.dtype(config.compute_dtype), _WORDS[config.compute_dtype]
    words = 2 * config.kv_dim * tokens
    pools = tuple(jnp.zeros((num_blocks, words), word) for _ in range(placement.num_pools))
    sizes = (config.linear_num_key_heads, config.linear_num_value_heads)
    sizes += (config.linear_key_head_dim, config.linear_value_head_dim)
    slots = tuple(
        Slots(ops.gdn_slots(num_slots, *sizes, dtype), jnp.zeros((num_slots, 3, config.conv_dim), dtype))
        for _ in placement.state
    )
    return Cache(pools, slots, placement)


def kv_view(pool: UInt[Array, "num_blocks words"], config: Config) -> UInt[Array, "num_blocks 2 heads tokens head_dim"]:
    """A pool's pages as keys and values."""
    return pool.reshape(pool.shape[0], 2, config.num_key_value_heads, -1, config.head_dim)


def write_kv(
    pool: UInt[Array, "num_blocks words"],
    k: Float[Array, "rows heads head_dim"],
    v: Float[Array, "rows heads head_dim"],
    block: Int32[Array, " rows"],
    offset: Int32[Array, " rows"],
    config: Config,
) -> UInt[Array, "num_blocks words"]:
    """Writes the keys and values of rows to their pages; rows whose block is outside the pool are dropped."""
    rows = lax.bitcast_convert_type(jnp.stack([k, v], axis=1), pool.dtype)
    view = kv_view(pool, config).at[block, :, :, offset, :].set(rows, mode="drop")
    return view.reshape(pool.shape)


def read_state(
    pool: UInt[Array, "num_blocks words"], page: Int32[Array, " sequences"], config: Config
) -> tuple[Float[Array, "sequences heads key_dim value_dim"], Float[Array, "sequences 3 channels"]]:
    """The Gated DeltaNet state and the convolution window that pages hold."""
    words = pool[page]
    size, window = _state_words(config), _window_words(config)
    state = words[:, :size]
    if pool.dtype == jnp.uint16:
        state = state.reshape(-1, size // 2, 2)
    state = lax.bitcast_convert_type(state, jnp.float32).reshape(-1, *state_shape(config))
    inputs = lax.bitcast_convert_type(words[:, size : size + window], jnp.dtype(config.compute_dtype))
    return state, inputs.reshape(-1, 3, config.conv_dim)


def write_state(
    pool: UInt[Array, "num_blocks words"],
    page: Int32[Array, " sequences"],
    state: Float[Array, "sequences heads key_dim value_dim"],
    window: Float[Array, "sequences 3 channels"],
) -> UInt[Array, "num_blocks words"]:
    """Writes states and windows to pages; sequences whose page is outside the pool are dropped."""
    sequences = state.shape[0]
    words = [lax.bitcast_convert_type(x, pool.dtype).reshape(sequences, -1) for x in (state, window)]
    words = jnp.concatenate(words, axis=1)
    return pool.at[page, : words.shape[1]].set(words, mode="drop")


def state_shape(config: Config) -> tuple[int, int, int]:
    """Value heads, key and value dimension of one sequence's Gated DeltaNet state."""
    return config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim


def _state_words(config: Config) -> int:
    return math.prod(state_shape(config)) * 4 // jnp.dtype(config.compute_dtype).itemsize


def _window_words(config: Config) -> int:
    return 3 * config.conv_dim
