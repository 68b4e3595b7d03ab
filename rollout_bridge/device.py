"""Where an engine's arrays are."""

from typing import Any

import jax
import jax.numpy as jnp


def on_device(tree: Any) -> Any:
    """`tree` on the engine's device, and bound to it.

    To JAX a program for arrays that are bound is another one than for arrays that are not: where all are,
    what the warm-up compiled serves weights of every origin. JAX's arrays that are there are shared. Host arrays
    are copied: JAX would read the memory of one that its owner may write to.
    """
    return jax.device_put(jax.tree.map(jnp.asarray, tree), jax.local_devices()[0])
