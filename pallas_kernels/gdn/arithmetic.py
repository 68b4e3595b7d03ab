"""The arithmetic of one chunk, shared by the executor of whole chunks and that of one row.

Arrays start with heads. Whole chunks have 64 rows, the one-row form has one; a row gets the same bits in both:
products are row-invariant (`tile.dot`), products that are added to are rounded first, exponentials are taken over
64 lanes (over 3, 5 or 7 XLA's `exp` has other bits, measured) and stored before they are used.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from isojax.layouts import CHUNK
from pallas_kernels import tile
from pallas_kernels.region import exact_product


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """`tile.dot` of every head; axes are counted without the heads."""
    return jax.vmap(functools.partial(tile.dot, contract=contract))(a, b)


def as_operand(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 `x` to the compute dtype and keeps it float32: XLA may not drop this rounding."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def exponential(x: Float32[Array, "*rows 64"]) -> Float32[Array, "*rows 64"]:
    """exp(x), stored."""
    return lax.optimization_barrier(jnp.exp(x))


def decay_between(
    later: Float32[Array, "heads rows 1"], earlier: Float32[Array, "heads 1 64"], visible: jax.Array
) -> Float32[Array, "heads rows 64"]:
    """exp(later − earlier) where `visible`, else 0: the exponent is masked first, else it may overflow."""
    return jnp.where(visible, exponential(jnp.where(visible, later - earlier, 0.0)), 0.0)


def per_value_head(x: jax.Array, heads: int) -> jax.Array:
    """The key head of each value head: h // (value heads / key heads)."""
    return jnp.repeat(x, heads // x.shape[0], axis=0)


def unit_inverse(a: Float32[Array, "heads 64 64"]) -> Float32[Array, "heads 64 64"]:
    """(I + a)^-1 for strictly lower triangular `a`, right-looking.

    Row i becomes e_i − a_i0 T_0 − a_i1 T_1 − …: each element meets its rounded products in ascending j,
    as in `inverse_row`. Rows j ≥ i meet a zero, which changes no bit.
    """
    identity = jnp.where(lower(strict=False) & ~lower(strict=True), 1.0, 0.0)

    def eliminate(j, t):
        column = lax.dynamic_slice_in_dim(a, j, 1, 2)
        return t - exact_product(column, lax.dynamic_slice_in_dim(t, j, 1, 1))

    return lax.fori_loop(0, CHUNK - 1, eliminate, jnp.broadcast_to(identity, a.shape).astype(jnp.float32))


def inverse_row(
    a: Float32[Array, "heads 64"], t: Float32[Array, "heads 64 64"], row: jax.Array, count: jax.Array
) -> Float32[Array, "heads 64"]:
    """Row `row` of `unit_inverse` from the rows before it, left-looking.

    Args:
        a: The row of the matrix, zero from `row` on.
        t: The inverse; rows from `row` on may hold anything.
        row: Which row, for every head.
        count: At least the greatest `row`.
    """
    unit = jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, 1) == row, 1.0, 0.0)

    def subtract(j, x):
        column = lax.dynamic_slice_in_dim(a, j, 1, 1)
        known = jnp.where(j < row, lax.dynamic_slice_in_dim(t, j, 1, 1)[:, 0], 0.0)
        return x - exact_product(column, known)

    return lax.fori_loop(0, count, subtract, unit)


def lower(*, strict: bool) -> jax.Array:
    """Which of 64 × 64 elements lie below the diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return row > column if strict else row >= column


def written_rows(beta: jax.Array, v: jax.Array, gamma: jax.Array, ks: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """R = β (V − γ K S), as operand."""
    return as_operand(beta * (v - exact_product(gamma, ks)), dtype)


def next_state(
    state: Float32[Array, "heads key_dim value_dim"],
    k: Float32[Array, "heads 64 key_dim"],
    u: Float32[Array, "heads 64 value_dim"],
    decay: Float32[Array, "heads 64"],
    dtype: jnp.dtype,
) -> Float32[Array, "heads key_dim value_dim"]:
    """S' = γ_C S + Σ_j exp(G_C − G_j) k_jᵀ u_j, the decayed keys as operand."""
    last = decay[:, CHUNK - 1 :]
    tail = as_operand(k * exponential(last - decay)[:, :, None], dtype)
    gamma = exponential(decay)[:, CHUNK - 1 :, None]
    return exact_product(gamma, state) + product(tail, u, (0, 0))
