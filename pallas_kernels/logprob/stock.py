"""The native twins: XLA's own log-softmax, differentiated by autodiff."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.logprob import reference
from pallas_kernels.logprob.kernel import Numerics


def logprob(
    logits: Float32[Array, "rows vocab"],
    targets: Int32[Array, " rows"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    numerics: Numerics = Numerics(),
) -> tuple[Float32[Array, " rows"], Float32[Array, " rows"]]:
    """Log-probability and entropy in nats, summed in the order that XLA chooses."""
    del numerics
    rows = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), logits.shape[:1])
    return reference.logprob(logits, targets, temperature=rows, vocab=vocab, keep=keep)


def logprobs_all(
    logits: Float32[Array, "rows vocab"],
    *,
    temperature: float | Float32[Array, ""] | Float32[Array, " rows"],
    vocab: int | None = None,
    keep: Bool[Array, "rows vocab"] | None = None,
    numerics: Numerics = Numerics(),
) -> Float32[Array, "rows vocab"]:
    """The log-probability of every word, summed in the order that XLA chooses."""
    del numerics
    rows = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), logits.shape[:1])
    return reference.logprobs_all(logits, temperature=rows, vocab=vocab, keep=keep)
