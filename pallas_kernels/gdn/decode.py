"""Computes one row of the delta rule for many requests, and closes the chunks that are full."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from isojax.layouts import CHUNK
from pallas_kernels.gdn.arithmetic import (
    as_operand,
    decay_between,
    exponential,
    inverse_row,
    next_state,
    per_value_head,
    product,
    written_rows,
)
from pallas_kernels.gdn.slots import OpenChunk
from pallas_kernels.region import exact_product, region_call


def row(
    q: Float[Array, "requests key_heads key_dim"],
    k: Float[Array, "requests key_heads key_dim"],
    v: Float[Array, "requests heads value_dim"],
    g: Float32[Array, "requests heads"],
    beta: Float32[Array, "requests heads"],
    offset: Int32[Array, " requests"],
    held: OpenChunk,
) -> tuple[
    Float[Array, "requests heads value_dim"],
    Float[Array, "requests heads value_dim"],
    Float[Array, "requests heads value_dim"],
    Float32[Array, "requests heads 64"],
    Float32[Array, "requests heads"],
]:
    """Row `offset` of each request's open chunk, from the rows before it.

    Returns:
        Outputs, and the row's `r`, `u`, `t` and `decay`.
    """
    dtype = v.dtype
    requests, heads, _ = v.shape
    key_heads = k.shape[1]
    inputs = (q, k, v, g, beta, offset, held)
    leaves, structure = jax.tree.flatten(inputs)

    def gdn_decode_kernel(*refs):
        o_ref, r_ref, u_ref, t_ref, decay_ref = refs[len(leaves) :]
        q, k, v, g, beta, offset, held = jax.tree.map(lambda ref: ref[...], structure.unflatten(refs[: len(leaves)]))
        wide = [x.reshape(-1, *x.shape[2:]).astype(jnp.float32) for x in (q, k, v)]
        (q, k, v), (g, beta) = wide, (x.reshape(-1, 1) for x in (g, beta))
        cached = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]).astype(jnp.float32), held)
        at_key, at = (jnp.repeat(offset, n)[:, None] for n in (key_heads, heads))  # One for each request and head.
        lane = lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1)

        def insert(rows, new, at):
            """The chunk's rows up to the new one; later rows are zero."""
            index, at = lane[:, :, None], at[:, :, None]
            return jnp.where(index < at, rows, jnp.where(index == at, new[:, None], 0.0))

        def pick(x, index):
            """The element of each row at `index`, or 0 before the first: a sum with one term that is not zero."""
            return jnp.sum(jnp.where(lane == index, x, 0.0), axis=1, keepdims=True)

        total = pick(cached.decay, at - 1) + g
        decay = jnp.where(lane < at, cached.decay, jnp.where(lane == at, total, 0.0))
        between = decay_between(total[:, :, None], decay[:, None], (lane <= at)[:, None])[:, 0]
        gamma = pick(exponential(decay), at)
        keys = insert(cached.k, k, at_key)
        both = jnp.stack([k, q], axis=1)
        kk, qk = jnp.unstack(per_value_head(product(both, keys, (1, 1)), v.shape[0]), axis=1)
        ks, qs = jnp.unstack(product(per_value_head(both, v.shape[0]), cached.state), axis=1)

        a = jnp.where(lane < at, beta * kk * between, 0.0)
        t = inverse_row(a, cached.t, at, jnp.max(offset))
        r = written_rows(beta, v, gamma, ks, dtype)
        u = as_operand(product(as_operand(t, dtype)[:, None], insert(cached.r, r, at))[:, 0], dtype)
        inside = product(as_operand(qk * between, dtype)[:, None], insert(cached.u, u, at))[:, 0]
        o = exact_product(gamma, qs) + inside
        for ref, x in ((o_ref, o), (r_ref, r), (u_ref, u), (t_ref, t), (decay_ref, total)):
            ref[...] = x.astype(ref.dtype).reshape(ref.shape)

    rows = jax.ShapeDtypeStruct(v.shape, dtype)
    shapes = [rows, rows, rows]
    shapes += [jax.ShapeDtypeStruct((requests, heads, *rest), jnp.float32) for rest in ((CHUNK,), ())]
    return tuple(region_call("gdn.decode", gdn_decode_kernel, out_shape=shapes)(*leaves))


def close(
    held: OpenChunk,
    closing: Bool[Array, " requests"],
    state: Float32[Array, "requests heads key_dim value_dim"],
) -> tuple[Float32[Array, "requests heads key_dim value_dim"], Float[Array, "requests heads key_dim value_dim"]]:
    """The next state of the requests that close their chunk, `state` of the others; also as operands."""
    dtype = held.k.dtype

    def gdn_close_kernel(
        k_ref,  # [requests, key_heads, 64, key_dim]
        u_ref,  # [requests, heads, 64, value_dim]
        decay_ref,  # [requests, heads, 64]
        closing_ref,  # [requests]
        state_ref,  # [requests, heads, key_dim, value_dim]
        next_ref,  # [requests, heads, key_dim, value_dim]
        operand_ref,  # [requests, heads, key_dim, value_dim]
    ):
        def of_request(i, _):
            def closed():
                u = u_ref[i].astype(jnp.float32)
                k = per_value_head(k_ref[i].astype(jnp.float32), u.shape[0])
                return next_state(state_ref[i], k, u, decay_ref[i], dtype)

            after = lax.cond(closing_ref[i], closed, lambda: state_ref[i])
            next_ref[i] = after
            operand_ref[i] = after.astype(dtype)

        lax.fori_loop(0, closing.shape[0], of_request, None)

    shapes = [jax.ShapeDtypeStruct(state.shape, d) for d in (jnp.float32, dtype)]
    return tuple(
        region_call("gdn.close", gdn_close_kernel, out_shape=shapes)(held.k, held.u, held.decay, closing, state)
    )
