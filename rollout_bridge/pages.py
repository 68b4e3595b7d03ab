"""Moves pages of the cache: what vLLM asks for before a step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

type Pools = tuple[jax.Array, ...]

_AT_ONCE = 16
"""Pages of one program; lists are padded to it."""


def zero(pools: Pools, blocks: Sequence[int]) -> Pools:
    """Zeroes newly owned pages in place, so that nothing that was there can be read as a number."""
    for to in _padded(blocks, pools[0].shape[0]):
        pools = _zeroed(pools, to)
    return pools


def copy(pools: Pools, copies: Sequence[Any]) -> Pools:
    """Copies pages in place; `copies` are vLLM's (source, destination) pairs, which do not depend on each other."""
    sources, targets = zip(*((pair[0], pair[1]) for pair in copies), strict=True)
    for source, to in zip(_padded(sources, 0), _padded(targets, pools[0].shape[0]), strict=True):
        pools = _copied(pools, source, to)
    return pools


def _padded(blocks: Sequence[int], fill: int) -> list[np.ndarray]:
    padding = [fill] * (-len(blocks) % _AT_ONCE)
    return list(np.array([*blocks, *padding], np.int32).reshape(-1, _AT_ONCE))


@functools.partial(jax.jit, donate_argnums=0)
def _zeroed(pools: Pools, to: jax.Array) -> Pools:
    return tuple(pool.at[to].set(jnp.zeros((), pool.dtype), mode="drop") for pool in pools)


@functools.partial(jax.jit, donate_argnums=0)
def _copied(pools: Pools, source: jax.Array, to: jax.Array) -> Pools:
    return tuple(pool.at[to].set(pool[source], mode="drop") for pool in pools)
