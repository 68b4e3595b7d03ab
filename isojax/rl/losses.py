"""Losses of one token: plain functions that `policy_gradient` runs as a region, row by row."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class TokenFields(NamedTuple):
    """What a loss may know of each token besides the policy's own log-probability and entropy."""

    rollout_logprobs: Float[Array, " rows"]
    advantages: Float[Array, " rows"]
    reference_logprobs: Float[Array, " rows"]
    """Under the reference policy; those of the rollout where the batch names no reference."""


@runtime_checkable
class TokenLoss(Protocol):
    """A differentiable function of single tokens: row r of the result depends on row r alone.

    It may use any elementwise `jnp`; it may not sum. `policy_gradient` runs it on 64 rows at a
    time, so that neither value nor gradient depends on the micro-batch, weights it by one over
    the number of sampled tokens of the whole batch, and adds.
    """

    def __call__(
        self, logprobs: Float[Array, " rows"], entropy: Float[Array, " rows"], fields: TokenFields, /
    ) -> Float[Array, " rows"]: ...


def grpo_loss(
    logprobs: Float[Array, " rows"],
    entropy: Float[Array, " rows"],
    fields: TokenFields,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    kl: float = 0.0,
    entropy_bonus: float = 0.0,
) -> Float[Array, " rows"]:
    """The clipped policy-gradient loss of each token (Schulman et al. 2017; token mean as in DAPO, Yu et al. 2025).

    Args:
        logprobs: Under the policy that learns.
        entropy: Of the distribution that each token was drawn from, in nats.
        fields: What else is known of each token.
        clip: The ratio counts only within 1 − `clip` and 1 + `clip_high`.
        clip_high: Upper clip; `clip` by default.
        kl: Weight of the divergence from the reference policy, k3 estimate (Schulman 2020).
        entropy_bonus: Weight of the entropy, in loss per nat.
    """
    ratio = jnp.exp(logprobs - fields.rollout_logprobs)
    clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    loss = -jnp.minimum(ratio * fields.advantages, clipped * fields.advantages)
    if kl:
        difference = jax.lax.stop_gradient(fields.reference_logprobs) - logprobs
        loss = loss + kl * (jnp.expm1(difference) - difference)
    if entropy_bonus:
        loss = loss - entropy_bonus * entropy
    return loss


def supervised_loss(
    logprobs: Float[Array, " rows"], entropy: Float[Array, " rows"], fields: TokenFields
) -> Float[Array, " rows"]:
    """The cross-entropy of each token, times its advantage: pass 1 for tokens to imitate."""
    del entropy
    return -logprobs * fields.advantages
