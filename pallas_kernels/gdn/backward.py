"""The gradient of the delta rule over whole chunks, the chunks of a sequence in a reverse chain."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from isojax import trees
from isojax.layouts import CHUNK
from pallas_kernels.gdn.arithmetic import (
    as_operand,
    decay_between,
    exponential,
    lower,
    per_value_head,
    product,
    written_rows,
)
from pallas_kernels.gdn.chunks import Kept, Rows
from pallas_kernels.gdn.numerics import Schedule
from pallas_kernels.gdn.program import num_programs, over_heads
from pallas_kernels.region import exact_product
from pallas_kernels.step import Chunks
from pallas_kernels.tree_sum import fold_axis


def gradients(
    rows: Rows,
    kept: Kept,
    o_grad: Float[Array, "blocks heads 64 value_dim"],
    chunks: Chunks,
    schedule: Schedule,
) -> Rows:
    """The gradients of `chunks.forward` by its rows; states and open chunks have none.

    Roundings pass gradients unchanged. With ′ for the gradient, ᵒ for rounding to an operand, γ = exp(G),
    D_ij = exp(G_i − G_j) for j ≤ i, tail = exp(G_63 − G), and S′ that of the chunk's last state:

        U′ = Pᵀ O′ + (tail K)ᵒ S′ᵒ         R′ = Tᵀ U′ᵒ         A′ = −R′ᵒ Uᵀ (j < i)        P′ = O′ Uᵀ (j ≤ i)
        X_q = (γ O′)ᵒ    X_k = (−β γ R′)ᵒ    M_q = (P′ D)ᵒ    M_k = (β A′ D)ᵒ (j < i)      Y = U S′ᵒᵀ
        Q′ = X_q Sᵀ + M_q K                K′ = X_k Sᵀ + M_qᵀ Q + M_k K + M_kᵀ K + tail Y      V′ = β R′
        β′ = Σ R′ (V − γ K S) + Σ_j A′ (K Kᵀ) D
        G′_i = Σ O′ γ Q S − Σ R′ β γ K S + Σ_j W_ij − Σ_j W_ji − E_i,   W = P′ (Q Kᵀ) D + A′ A,   E_i = Σ tail K Y
        G′_63 gets also Σ_i E_i + γ_63 Σ S S′
        S′ of the chunk before = γ_63 S′ + Qᵀ X_q + Kᵀ X_k

    Sums of three terms and more add from the left, in float32. Unmarked Σ over lanes and rows are in tree order of
    rounded products. Q′ and K′ of a key head add its value heads ascending, then round. G′ is left to be summed to g′.
    """
    dtype = rows.v.dtype
    blocks, key_heads = rows.k.shape[:2]

    def gdn_chunks_backward_kernel(inputs, grads_ref):
        sequences_ref, ends_ref, rows_ref, kept_ref, o_grad_ref = inputs
        last_row = lax.broadcasted_iota(jnp.int32, (1, CHUNK), 1) == CHUNK - 1

        def block(i, carry):
            c = blocks - 1 - i
            state_grad, current = carry
            is_there = ends_ref[c] > 0
            state_grad = jnp.where(is_there & (sequences_ref[c] != current), 0.0, state_grad)

            q, k, v, do, s, t = (
                ref[c].astype(jnp.float32)
                for ref in (rows_ref.q, rows_ref.k, rows_ref.v, o_grad_ref, kept_ref.state, kept_ref.inverse)
            )
            count = v.shape[0]
            decay, beta = rows_ref.decay[c], rows_ref.beta[c][:, :, None]
            between = decay_between(decay[:, :, None], decay[:, None, :], lower(strict=False))
            kk, qk = (per_value_head(product(x, k, (1, 1)), count) for x in (k, q))
            q, k = per_value_head(q, count), per_value_head(k, count)
            gamma, tail = exponential(decay)[:, :, None], exponential(decay[:, CHUNK - 1 :] - decay)[:, :, None]
            ks, qs = product(k, s), product(q, s)
            r = written_rows(beta, v, gamma, ks, dtype)
            u = as_operand(product(t, r), dtype)
            p = as_operand(qk * between, dtype)

            ds = as_operand(state_grad, dtype)
            du = product(p, do, (0, 0)) + product(as_operand(k * tail, dtype), ds)
            dr = product(t, as_operand(du, dtype), (0, 0))
            da = jnp.where(lower(strict=True), -product(as_operand(dr, dtype), u, (1, 1)), 0.0)
            dp = jnp.where(lower(strict=False), product(do, u, (1, 1)), 0.0)
            xq, xk = as_operand(gamma * do, dtype), as_operand(-(beta * gamma) * dr, dtype)
            mq, mk = as_operand(dp * between, dtype), as_operand(beta * da * between, dtype)
            y = product(u, ds, (1, 1))

            dq = product(xq, s, (1, 1)) + product(mq, k)
            dk = trees.chain(
                jnp.add,
                [
                    product(xk, s, (1, 1)),
                    product(mq, q, (0, 0)),
                    product(mk, k),
                    product(mk, k, (0, 0)),
                    exact_product(tail, y),
                ],
            )
            plain = v - exact_product(gamma, ks)
            dbeta = _sum(dr, plain, axis=2) + _sum(da, kk * between, axis=2)
            w = _below(exact_product(dp, qk * between) + exact_product(da, beta * kk * between))
            e = _sum(tail * k, y, axis=2)
            terms = [
                _sum(do, gamma * qs, axis=2),
                -_sum(dr, beta * gamma * ks, axis=2),
                fold_axis(w, 2),
                -jnp.swapaxes(fold_axis(w, 1), 1, 2),
                -e,
            ]
            all_rows = fold_axis(e, 1) + exact_product(gamma[:, CHUNK - 1 :], fold_axis(_sum(s, state_grad, axis=2), 1))
            ddecay = trees.chain(jnp.add, terms)[:, :, 0]
            ddecay = jnp.where(last_row, ddecay + all_rows[:, 0], ddecay)

            key_sum = _per_key_head(rows_ref.k.shape[1])
            for ref, x in zip(jax.tree.leaves(grads_ref), (key_sum(dq), key_sum(dk), beta * dr), strict=False):
                ref[c] = x.astype(dtype)
            grads_ref.beta[c], grads_ref.decay[c] = dbeta[:, :, 0], ddecay

            before = exact_product(gamma[:, CHUNK - 1 :], state_grad) + product(q, xq, (0, 0)) + product(k, xk, (0, 0))
            return jnp.where(is_there, before, state_grad), jnp.where(is_there, sequences_ref[c], current)

        lax.fori_loop(0, blocks, block, (jnp.zeros(kept_ref.state.shape[1:], jnp.float32), jnp.int32(-1)))

    return over_heads(
        "gdn.chunks.backward",
        gdn_chunks_backward_kernel,
        (chunks.sequence, chunks.end, rows, kept, o_grad),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows),
        num_programs(key_heads, schedule.key_heads),
    )


def _sum(a: jax.Array, b: jax.Array, *, axis: int) -> Float32[Array, "heads rows 1"]:
    """Σ a b over an axis: rounded products in tree order."""
    return fold_axis(exact_product(a, b), axis)


def _below(x: jax.Array) -> jax.Array:
    return jnp.where(lower(strict=True), x, 0.0)


def _per_key_head(key_heads: int):
    """Adds the value heads of each key head, ascending."""

    def add(x):
        grouped = x.reshape(key_heads, -1, *x.shape[1:])
        return trees.chain(jnp.add, [grouped[:, i] for i in range(grouped.shape[1])])

    return add
