"""The native twins: the chunk form for blocks, the recurrence for single tokens, as the field's engines mix them.

Two algorithms of one layer, in XLA's own order, differentiated by autodiff. A slot keeps the float32 state
after the request's last token, where the exact form keeps the rows of its open chunk.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from isojax.layouts import CHUNK
from isojax.pytrees import pytree
from pallas_kernels.step import Chunks, Decode


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class RunningState:
    """The state of each request after its last token."""

    state: Float32[Array, "slots heads key_dim value_dim"]


def gdn_slots(
    num_slots: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: DTypeLike
) -> RunningState:
    """Slots for `num_slots` requests that have no token yet."""
    del key_heads, dtype
    return RunningState(jnp.zeros((num_slots, heads, key_dim, value_dim), jnp.float32))


def gdn_chunks(
    q: Float[Array, "blocks 64 key_heads key_dim"],
    k: Float[Array, "blocks 64 key_heads key_dim"],
    v: Float[Array, "blocks 64 heads value_dim"],
    g: Float32[Array, "blocks 64 heads"],
    beta: Float32[Array, "blocks 64 heads"],
    chunks: Chunks,
    state: Float32[Array, "sequences heads key_dim value_dim"],
    open: RunningState | None = None,
) -> tuple[
    Float[Array, "blocks 64 heads value_dim"], Float32[Array, "sequences heads key_dim value_dim"], RunningState
]:
    """The usual chunk form in float32: U = T β V, W = T β e^G K, V′ = U − W S, for whole blocks.

    Returns:
        Outputs, the state after each sequence's last closed chunk, and that after its last row.
    """
    group = v.shape[2] // k.shape[2]
    row = jnp.arange(CHUNK)
    there = (row >= chunks.begin[:, None]) & (row < chunks.end[:, None])

    def heads_first(x):
        masked = jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, 0)
        return jnp.swapaxes(masked.astype(jnp.float32), 1, 2)

    q, k = (jnp.repeat(heads_first(x), group, axis=1) for x in (q, k))
    values, g, beta = heads_first(v), heads_first(g), heads_first(beta)
    decay = jnp.cumsum(g, axis=2)
    causal = row[:, None] >= row
    between = jnp.where(causal, jnp.exp(jnp.where(causal, decay[..., :, None] - decay[..., None, :], 0)), 0)
    a = jnp.tril(beta[..., None] * jnp.einsum("bhik,bhjk->bhij", k, k) * between, -1)
    grown = jnp.exp(decay)[..., None]
    solved = solve_triangular(
        a + jnp.eye(CHUNK), jnp.concatenate([beta[..., None] * values, (beta[..., None] * grown) * k], -1), lower=True
    )
    u, w = solved[..., : v.shape[3]], solved[..., v.shape[3] :]
    scores = jnp.einsum("bhik,bhjk->bhij", q, k) * between
    tail = jnp.exp(decay[..., -1:] - decay)[..., None] * k

    def block(carry, inputs):
        running, closed, held, current = carry
        sequence, index, begin, end, u, w, q, scores, tail, grown = inputs
        is_new = (end > 0) & (sequence != current)
        page = jnp.where(index == 0, 0, state[sequence])
        running = jnp.where(is_new, jnp.where(begin > 0, held[sequence], page), running)
        written = u - w @ running
        o = grown * (q @ running) + scores @ written
        after = grown[:, -1:] * running + jnp.swapaxes(tail, 1, 2) @ written
        running = jnp.where(end > 0, after, running)
        last = jnp.where(end == CHUNK, running, jnp.where(is_new, page, closed[sequence]))
        closed = closed.at[sequence].set(jnp.where(end > 0, last, closed[sequence]))
        held = held.at[sequence].set(jnp.where(end > 0, running, held[sequence]))
        return (running, closed, held, jnp.where(end > 0, sequence, current)), o

    held = jnp.zeros_like(state) if open is None else open.state
    inputs = (chunks.sequence, chunks.index, chunks.begin, chunks.end, u, w, q, scores, tail, grown)
    (_, closed, held, _), o = lax.scan(block, (jnp.zeros_like(state[0]), state, held, jnp.int32(-1)), inputs)
    o = jnp.where(there[..., None, None], jnp.swapaxes(o, 1, 2), 0).astype(v.dtype)
    return o, *jax.tree.map(lax.stop_gradient, (closed, RunningState(held)))


def gdn_decode(
    q: Float[Array, "requests key_heads key_dim"],
    k: Float[Array, "requests key_heads key_dim"],
    v: Float[Array, "requests heads value_dim"],
    g: Float32[Array, "requests heads"],
    beta: Float32[Array, "requests heads"],
    decode: Decode,
    slots: RunningState,
    slot: Int32[Array, " requests"],
) -> tuple[Float[Array, "requests heads value_dim"], RunningState]:
    """One step of the recurrence in float32."""
    group = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (q, k))
    held = slots.state.at[slot].get(mode="clip")
    state = jnp.exp(g)[..., None, None] * jnp.where((decode.position == 0)[:, None, None, None], 0, held)
    u = beta[..., None] * (v.astype(jnp.float32) - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * u[..., None, :]
    o = jnp.einsum("bhkv,bhk->bhv", state, q).astype(v.dtype)
    at = jnp.where(decode.valid, slot, slots.state.shape[0])
    return jnp.where(decode.valid[:, None, None], o, 0), RunningState(slots.state.at[at].set(state, mode="drop"))


def gdn_close(
    decode: Decode,
    slots: RunningState,
    slot: Int32[Array, " requests"],
    state: Float32[Array, "requests heads key_dim value_dim"],
) -> tuple[Float32[Array, "requests heads key_dim value_dim"], RunningState]:
    """The running state of the requests whose row ends a chunk, `state` (zero in chunk 0) of the others."""
    closing = decode.valid & (decode.position % CHUNK == CHUNK - 1)
    state = jnp.where((decode.position < CHUNK)[:, None, None, None], 0, state)
    held = slots.state.at[slot].get(mode="clip")
    return jnp.where(closing[:, None, None, None], held, state), slots
