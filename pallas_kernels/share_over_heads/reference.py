"""The definition of `share_over_heads`, and of the order in which its gradient adds."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from isojax import trees
from isojax.layouts import split_bounds


def share_over_heads(scale: Float[Array, " head_dim"], heads: int) -> Float[Array, "heads head_dim"]:
    """`scale` for every head."""
    return jnp.broadcast_to(scale, (heads, *scale.shape))


def head_sum(grad: Float[Array, "heads head_dim"], num_splits: int | None = None) -> Float[Array, " head_dim"]:
    """Adds the heads: a chain inside each of gcd(heads, 8) contiguous splits, a tree over the splits."""
    heads = grad.shape[0]
    bounds = split_bounds(heads, num_splits or math.gcd(heads, 8))
    return trees.fold(jnp.add, [trees.chain(jnp.add, list(grad[start:end])) for start, end in bounds])
