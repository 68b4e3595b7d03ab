"""The policy as a Flax module: it holds parameters, sizes and the bound ops; functions hold the maths."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


from pallas_kernels.ops import Ops
from qwen35_moe.config import PERIOD, Config, is_attention


class Qwen35Moe(nnx.Module):
    """A Qwen3.5 text model, with experts or dense: float32 parameters, computed in `config.compute_dtype`.

    Attributes:
        config: The sizes.
        ops: The ops that the contract bound; what trains and what rolls out must be the same.
        weights: The nested parameters of docs/architecture.md, as `nnx.Param`.
    """

    def __init__(self, config: Config, params: Mapping[str, Any], ops: Ops):
        self.config = config
        self.ops = ops
        self.weights = _as_modules(params)

    def params(self) -> dict[str, Any]:
        """The parameters as a nested dict of arrays; inside `jax.grad` the traced ones."""
        return nnx.to_pure_dict(nnx.state(self.weights, nnx.Param))


def _as_modules(params: Mapping[str, Any]) -> nnx.Dict:
    return nnx.Dict({
        name: _as_modules(value) if isinstance(value, Mapping) else nnx.Param(value) for name, value in params.items()
    })


def param_shapes(config: Config) -> dict[str, Any]:
    """The shape of every parameter, nested as the parameters are."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Any] = {
        "embed_tokens": (vocab, hidden),
        "norm": (hidden,),
        "layers": {str(layer): _layer_shapes(layer, config) for layer in range(PERIOD)},
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (vocab, hidden)
    return shapes


def _layer_shapes(layer: int, config: Config) -> dict[str, Any]:
    hidden = config.hidden_size
    value_dim, value_heads = config.linear_value_dim, config.linear_num_value_heads
    mixer = (
        {
            "q_proj": (2 * config.query_dim, hidden),
            "k_proj": (config.kv_dim, hidden),
            "v_proj": (config.kv_dim, hidden),
            "o_proj": (hidden, config.query_dim),
            "q_norm": (config.head_dim,),
            "k_norm": (config.head_dim,),
        }
        if is_attention(layer)
        else {
            "in_proj_qkv": (config.conv_dim, hidden),
            "in_proj_z": (value_dim, hidden),
            "in_proj_b": (value_heads, hidden),
            "in_proj_a": (value_heads, hidden),
            "conv": (config.conv_dim, 4),
            "A_log": (value_heads,),
            "dt_bias": (value_heads,),
            "norm": (config.linear_value_head_dim,),
            "out_proj": (hidden, value_dim),
        }
    )
    experts, width, shared = config.num_experts, config.moe_intermediate_size, config.shared_expert_intermediate_size
    dense = config.intermediate_size
    mlp = (
        {
            "router": (experts, hidden),
            "gate_up": (experts, 2 * width, hidden),
            "down": (experts, hidden, width),
            "shared_gate_proj": (shared, hidden),
            "shared_up_proj": (shared, hidden),
            "shared_down_proj": (hidden, shared),
            "shared_gate": (1, hidden),
        }
        if config.is_moe
        else {"gate_proj": (dense, hidden), "up_proj": (dense, hidden), "down_proj": (hidden, dense)}
    )
    layer_shapes = {"input_norm": (hidden,), "post_norm": (hidden,), "mixer": mixer, "mlp": mlp}
    return jax.tree.map(lambda shape: (config.periods, *shape), layer_shapes, is_leaf=_is_shape)


def init_params(config: Config, seed: int, scale: float = 0.02) -> dict[str, Any]:
    """Fresh parameters: matrices normal with deviation `scale`, zero-centred norms 0, `A_log` log U(1, 16), `dt_bias` 1.

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
