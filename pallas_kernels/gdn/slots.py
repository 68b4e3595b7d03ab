"""What a running request keeps of its open chunk."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from isojax.layouts import CHUNK
from isojax.pytrees import pytree


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class OpenChunk:
    """The rows of a chunk that is not full, one slot a request.

    Row r is there when the request has computed r + 1 tokens of the chunk; other rows hold anything and
    are never read. Names as in docs/gated_deltanet.md.

    Attributes:
        k: Normalised keys, in the compute dtype.
        r: What each token would write if the chunk's earlier tokens wrote nothing, as operand.
        u: What it writes, U = T R, as operand.
        t: Rows of T = (I + A)^-1, unrounded.
        decay: Cumulative log decay since the chunk's start.
        beta: Writing strength.
        state: S at the chunk's start, as operand.
    """

    k: Float[Array, "slots key_heads 64 key_dim"]
    r: Float[Array, "slots heads 64 value_dim"]
    u: Float[Array, "slots heads 64 value_dim"]
    t: Float32[Array, "slots heads 64 64"]
    decay: Float32[Array, "slots heads 64"]
    beta: Float32[Array, "slots heads 64"]
    state: Float[Array, "slots heads key_dim value_dim"]


def gdn_slots(num_slots: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: DTypeLike) -> OpenChunk:
    """Slots for `num_slots` requests, in which no chunk has a row yet."""

    def rows(*shape, dtype=dtype):
        return jnp.zeros((num_slots, *shape), dtype)

    return OpenChunk(
        k=rows(key_heads, CHUNK, key_dim),
        r=rows(heads, CHUNK, value_dim),
        u=rows(heads, CHUNK, value_dim),
        t=rows(heads, CHUNK, CHUNK, dtype=jnp.float32),
        decay=rows(heads, CHUNK, dtype=jnp.float32),
        beta=rows(heads, CHUNK, dtype=jnp.float32),
        state=rows(heads, key_dim, value_dim),
    )
