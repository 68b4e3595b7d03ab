"""The policy as a Flax module: it holds parameters, sizes and the bound ops; functions hold the maths."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.binding import Ops
from qwen35_moe.checkpoint.names import leaf_shapes, nest
from qwen35_moe.config import Config


class Qwen35Moe(nnx.Module):
    """A Qwen3.5 text model, with experts or dense: float32 parameters, computed in `config.compute_dtype`.

    Attributes:
        config: The sizes.
        ops: The ops that the contract bound; what trains and what rolls out must be the same.
        weights: The nested parameters of docs/architecture.md, as `nnx.Param`.
        folder: Of the checkpoint that it was read from, where its tokenizer is; None if it was made here.
    """

    def __init__(self, config: Config, params: Mapping[str, Any], ops: Ops):
        self.config = config
        self.ops = ops
        self.weights = _as_modules(params)
        self.folder: str | None = None

    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays; inside `jax.grad` the traced ones."""
        return nnx.to_pure_dict(nnx.state(self.weights, nnx.Param))


def _as_modules(params: Mapping[str, Any]) -> nnx.Dict:
    return nnx.Dict(
        {name: _as_modules(value) if isinstance(value, Mapping) else nnx.Param(value) for name, value in params.items()}
    )


def param_shapes(config: Config) -> dict[str, Any]:
    """The shape of every parameter, nested as the parameters are."""
    return nest(leaf_shapes(config))


def init_params(config: Config, seed: int, scale: float = 0.02) -> dict[str, Any]:
    """Fresh parameters: matrices normal (deviation `scale`), zero-centred norms 0, `A_log` log U(1, 16), `dt_bias` 1.

    Made on the host in NumPy, so that the bits do not depend on a device.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        name = path[-1].key
        if name == "A_log":
            value = np.log(rng.uniform(1.0, 16.0, shape))
        elif name == "dt_bias" or (name == "norm" and path[-2:-1] and getattr(path[-2], "key", "") == "mixer"):
            value = np.ones(shape)
        elif name in ("input_norm", "post_norm", "norm", "q_norm", "k_norm"):
            value = np.zeros(shape)
        elif name == "conv":
            value = rng.uniform(-0.5, 0.5, shape)
        else:
            value = scale * rng.standard_normal(shape)
        return jnp.asarray(value.astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, param_shapes(config), is_leaf=_is_shape)


def rollout_params(params: Mapping[str, Any], config: Config, ops: Ops) -> dict[str, Any]:
    """`params` as rollouts hold them: every matrix cast to the compute dtype by the op that training casts with.

    Vectors, the convolution and whatever else ops use in float32 stay as they are.
    """
    keep = {"norm", "input_norm", "post_norm", "q_norm", "k_norm", "A_log", "dt_bias", "conv"}
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w if path[-1].key in keep else ops.cast(w, config.compute_dtype), dict(params)
    )


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)
