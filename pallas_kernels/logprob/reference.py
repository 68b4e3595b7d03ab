"""The definition of `logprob`: the log-softmax of the words that can be drawn, at the temperature they are drawn at."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


def logprob(
    logits: Float[Array, "rows vocab"],
    targets: Int32[Array, " rows"],
    *,
    temperature: Float[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Log-probability of each target and entropy of each row, in nats, in the dtype of `logits`."""
    logprobs = logprobs_all(logits, temperature=temperature, vocab=vocab, keep=keep)
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
    p = jnp.exp(logprobs)
    return chosen, -jnp.sum(p * jnp.where(p == 0, 0, logprobs), axis=1)


def logprobs_all(
    logits: Float[Array, "rows vocab"],
    *,
    temperature: Float[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
) -> Float[Array, "rows vocab"]:
    """logits/T − max − log Σ exp(logits/T − max) over the words that are real and kept; −∞ for the others."""
    live = jnp.arange(logits.shape[1]) < (logits.shape[1] if vocab is None else vocab)
    live = live & (True if keep is None else keep)
    scaled = jnp.where(live, logits / temperature[:, None], -jnp.inf)
    shifted = scaled - lax.stop_gradient(jnp.max(scaled, axis=1, keepdims=True))
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=1, keepdims=True))
