"""Weights made from names: a model of any size without a file, the same on every machine."""

import zlib

import numpy as np

from qwen35_moe.checkpoint.load import Params, build_params
from qwen35_moe.checkpoint.names import tensors
from qwen35_moe.config import Config


def seeded_params(config: Config, seed: int = 0) -> Params:
    """Float32 parameters from `seeded_tensor`."""
    return build_params(config, lambda name, tensor: [seeded_tensor(name, tensor.shape, seed)])


def seeded_tensors(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors that `seeded_params` is made of, float32, by canonical Hugging Face name."""
    return {name: seeded_tensor(name, tensor.shape, seed) for name, tensor in tensors(config).items()}


def seeded_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Float32 values from NumPy's frozen MT19937 stream, of a size that a trained tensor of that name might have.

    Unlike a usual initialisation, nothing is 0 or 1, so that a norm or bias that is applied wrongly shows.
    With `seed` 0 these are the weights of the reference model (tests/qwen35_moe/tiny.py).
    """
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    if name.endswith("A_log"):
        return np.log(1 + 7 * random.random_sample(shape)).astype(np.float32)
    z = random.standard_normal(shape)
    if name.endswith("dt_bias"):
        z = -2 + 0.5 * z
    elif name.endswith("linear_attn.norm.weight"):
        z = 1 + 0.1 * z
    elif "norm" in name:
        z = 0.1 * z
    elif name.endswith("conv1d.weight"):
        z = 0.5 * z
    elif not name.endswith("embed_tokens.weight"):
        z = z / np.sqrt(shape[-1])
    return z.astype(np.float32)
