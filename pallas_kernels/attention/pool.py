"""The pool of pages that K and V live in, and how a kernel reads it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt

KV = Float[Array, "pages 2 kv_heads page_tokens width"] | UInt[Array, "pages 2 kv_heads page_tokens width"]
"""K, then V, of every page: in the compute dtype, or its bits as unsigned integers."""


def load_kv(kv_ref, pages_ref, sequence, head, block, size: int, live, dtype) -> tuple[jax.Array, jax.Array]:
    """Reads block `block` of `size` tokens of a sequence, where it lies in the pool.

    Tokens from position `live` on are zeroed by select: a page may hold anything there, NaN too.

    Returns:
        Keys and values, float32 `[size, width]`.
    """
    page_tokens = kv_ref.shape[3]
    first = block * size
    page, offset = pages_ref[sequence, first // page_tokens], first % page_tokens
    is_live = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0) < live

    def load(side: int) -> jax.Array:
        tile = kv_ref[page, side, head, pl.ds(offset, size), :]
        if jnp.issubdtype(tile.dtype, jnp.integer):
            tile = lax.bitcast_convert_type(tile, dtype)
        return jnp.where(is_live, tile.astype(jnp.float32), 0.0)

    return load(0), load(1)
