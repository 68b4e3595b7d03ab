"""The native twin of `global_norm`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


def global_norm(tree: Any) -> Float32[Array, ""]:
    """The norm of all leaves, added in the order that XLA chooses."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
