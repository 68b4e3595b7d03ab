"""The meaning of Gated DeltaNet (Yang et al. 2025): the recurrence, token by token. The oracle of every form."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def recurrent(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    g: Float[Array, "tokens heads"],
    beta: Float[Array, "tokens heads"],
    state: Float[Array, "heads key_dim value_dim"] | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "heads key_dim value_dim"]]:
    """S ← e^g S; u = β (v − Sᵀ k); S ← S + k uᵀ; o = Sᵀ q, for every token of one sequence and every value head.

    Value head h uses key head h // (heads / key_heads). All in the dtype of `g`.

    Returns:
        Outputs, and the state after the last token.
    """
    dtype, group = g.dtype, v.shape[1] // k.shape[1]
    if state is None:
        state = jnp.zeros((v.shape[1], k.shape[2], v.shape[2]), dtype)
    q, k = (jnp.repeat(x.astype(dtype), group, axis=1) for x in (q, k))

    def token(state, inputs):
        q, k, v, g, beta = inputs
        state = jnp.exp(g)[:, None, None] * state
        u = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * u[:, None, :]
        return state, jnp.einsum("hkv,hk->hv", state, q)

    state, o = lax.scan(token, state, (q, k, v.astype(dtype), g, beta))
    return o, state
