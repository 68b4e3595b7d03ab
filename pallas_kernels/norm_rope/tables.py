"""Rotary tables, made on the host in float64."""

import functools

import numpy as np
from jaxtyping import Float32


@functools.lru_cache(maxsize=8)
def rotary_tables(
    positions: int, rotary_dim: int, theta: float
) -> tuple[Float32[np.ndarray, "positions half"], Float32[np.ndarray, "positions half"]]:
    """Cosines and sines of position · theta^(−2j/rotary_dim), rounded once to float32 (Su et al. 2021).

    Never from a traced `sin`: two programs would compute two tables.
    """
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
