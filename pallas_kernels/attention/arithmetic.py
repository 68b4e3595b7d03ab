"""The arithmetic of one tile, shared by every attention kernel.

Row r of a result has the same bits in a tile of any height. That is what lets the one-row form
agree with the chunk form.
"""

import jax
import jax.numpy as jnp
from jax import lax

from isojax import trees
from isojax.layouts import block_of
from pallas_kernels import tile
from pallas_kernels.region import exact_product


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """`a` times `b` over axis `contract[0]` of `a` and `contract[1]` of `b`: a float32 chain over its blocks."""
    size = a.shape[contract[0]]
    block = block_of(size)

    def term(start: int) -> jax.Array:
        pieces = (
            lax.slice_in_dim(x, start, min(start + block, size), axis=axis)
            for x, axis in zip((a, b), contract, strict=True)
        )
        return tile.dot(*pieces, contract=contract)

    return trees.chain(jnp.add, [term(start) for start in range(0, size, block)])


def scaled_scores(queries: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """Scores `[rows, keys]` of float32 operands: scaled after their sum, and rounded before anything else."""
    return exact_product(product(queries, keys, (1, 1)), jnp.float32(scale))


def lane_sum(x: jax.Array) -> jax.Array:
    """Sums `[rows, lanes]` to `[rows, 1]` by halves, so that the compiler has no order to choose."""
    lanes = 1 << (x.shape[1] - 1).bit_length()
    x = jnp.pad(x, ((0, 0), (0, lanes - x.shape[1])))
    while lanes > 1:
        lanes //= 2
        x = x[:, :lanes] + x[:, lanes:]
    return x


def as_operand(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 `x` to the compute dtype and keeps it float32, as an operand of `product`.

    XLA may drop a cast down and up again; this rounding it may not.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
