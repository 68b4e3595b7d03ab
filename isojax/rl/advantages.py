"""How much better than its neighbours a sample was."""

from functools import partial

import numpy as np
from jaxtyping import Float

from isojax import trees


def group_advantages(
    rewards: Float[np.ndarray, "prompts samples"], *, scale: bool = True, eps: float = 1e-6
) -> Float[np.ndarray, "prompts samples"]:
    """Each reward less the mean of its prompt's samples, over their standard deviation (GRPO, Shao et al. 2024).

    Mean and variance are chains over the samples in float32, so the bits do not depend on how
    many prompts there are. A prompt whose samples all got one reward has advantages of exactly 0.

    Args:
        rewards: One row a prompt.
        scale: Whether to divide by the (population) standard deviation + `eps`; without, the
            difficulty of a prompt keeps its weight (Dr. GRPO, Liu et al. 2025).
        eps: Keeps the division finite, in units of reward.

    Raises:
        ValueError: If a reward is not finite.
    """
    rewards = np.asarray(rewards, np.float32)
    _refuse_not_finite(rewards)
    difference = rewards - _mean(rewards)
    if not scale:
        return difference
    return difference / (np.sqrt(_mean(difference * difference)) + np.float32(eps))


def whiten(values: Float[np.ndarray, "*shape"], *, eps: float = 1e-6) -> Float[np.ndarray, "*shape"]:
    """`values` less their mean, over their (population) standard deviation: chains over all of them, in float32.

    Raises:
        ValueError: If a value is not finite.
    """
    values = np.asarray(values, np.float32)
    return group_advantages(values.reshape(1, -1), eps=eps).reshape(values.shape)


def _mean(rows: np.ndarray) -> np.ndarray:
    """The mean of every row as a column; exact when a row holds one value only."""
    total = trees.chain(partial(np.add, dtype=np.float32), [*rows.T])
    mean = (total / np.float32(rows.shape[1]))[:, None]
    # k·r/k may miss r by a rounding: a group of equal rewards must not learn from that.
    return np.where(np.all(rows == rows[:, :1], axis=1, keepdims=True), rows[:, :1], mean)


def _refuse_not_finite(rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(
            f"the reward of prompt {prompt}, sample {sample} is {rewards[prompt, sample]}: return a finite number"
        )
