"""Which tensor of a checkpoint is which leaf of the parameters.

A tensor's *canonical* name is the one of a text model with fused experts, as transformers has it in memory. Files
may also write `model.language_model.` for `model.`, and one tensor for each expert and projection.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from qwen35_moe.config import CONV_TAPS, PERIOD, Config, is_attention

PASSED_THROUGH = ("model.visual.", "mtp.")
"""Beginnings of names that isojax carries from file to file without reading a meaning into them."""

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_PREFIX, _WRAPPED_PREFIX = "model.", "model.language_model."
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the text model.

    Attributes:
        leaf: Path of its leaf in the parameters, e.g. `("layers", "3", "mixer", "q_proj")`.
        shape: On disk, and of the leaf without its periods except where an axis of 1 is left out.
        period: Its place in the leaf, or None where the leaf is this tensor alone.
    """

    leaf: tuple[str, ...]
    shape: tuple[int, ...]
    period: int | None = None

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """What one period of the leaf has: the convolution's axis of one input channel is not kept."""
        return (self.shape[0], self.shape[2]) if self.leaf[-1] == "conv" else self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint names its tensors.

    Attributes:
        wrapped: Text tensors begin with `model.language_model.`, as in released multimodal checkpoints.
        fused: The experts of a layer are two tensors, else three for each expert. Dense models have neither.
    """

    wrapped: bool = False
    fused: bool = True

    def name(self, canonical: str) -> str:
        """A tensor's name in this layout, the expert form aside; the head's is the same in all."""
        return canonical.replace(_PREFIX, _WRAPPED_PREFIX, 1) if self.wrapped else canonical

    def parts(self, canonical: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold this one, in the order in which they fill it."""
        stem, _, last = self.name(canonical).rpartition(".")
        if self.fused or not stem.endswith(".mlp.experts"):
            return {self.name(canonical): shape}
        experts, rows, columns = shape
        projections, rows = (("gate", "up"), rows // 2) if last == "gate_up_proj" else (("down",), rows)
        return {f"{stem}.{e}.{p}_proj.weight": (rows, columns) for e in range(experts) for p in projections}

    @classmethod
    def of(cls, names: set[str]) -> list["Layout"]:
        """The layouts that these names follow: at least one, and more if forms are mixed."""
        text = {name for name in names if not name.startswith(PASSED_THROUGH)}
        wrapped = {name.startswith(_WRAPPED_PREFIX) for name in text if name.startswith(_PREFIX)} or {False}
        fused = {_EXPERT.fullmatch(name) is None for name in text if ".mlp.experts." in name} or {True}
        return [cls(w, f) for w in sorted(wrapped) for f in sorted(fused)]


def tensors(config: Config) -> dict[str, Tensor]:
    """Every tensor of the text model by its canonical name, in the order of layers. A tied head is not one."""
    vocab, hidden = config.vocab_size, config.hidden_size
    found = {
        EMBEDDING: Tensor(("embed_tokens",), (vocab, hidden)),
        "model.norm.weight": Tensor(("norm",), (hidden,)),
    }
    if not config.tie_word_embeddings:
        found[HEAD] = Tensor(("lm_head",), (vocab, hidden))
    for layer in range(config.num_hidden_layers):
        period, place = divmod(layer, PERIOD)
        for name, (path, shape) in _layer(config, layer).items():
            found[f"model.layers.{layer}.{name}"] = Tensor(("layers", str(place), *path.split("/")), shape, period)
    return found


def leaf_shapes(config: Config) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shape of every leaf of the parameters by its path."""
    return {
        t.leaf: t.leaf_shape if t.period is None else (config.periods, *t.leaf_shape) for t in tensors(config).values()
    }


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A nested dict from values by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def num_parameters(config: Config) -> int:
    """Parameters of the text model; a tied head counts once."""
    return sum(math.prod(tensor.shape) for tensor in tensors(config).values())


def _layer(config: Config, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Leaf path and disk shape of a layer's tensors, by their name within it."""
    hidden = config.hidden_size
    mixer = _attention(config) if is_attention(layer) else _delta_net(config)
    mlp = _experts(config) if config.is_moe else _dense(config)
    return {
        "input_layernorm.weight": ("input_norm", (hidden,)),
        "post_attention_layernorm.weight": ("post_norm", (hidden,)),
        **mixer,
        **mlp,
    }


def _delta_net(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, heads, values = config.hidden_size, config.linear_num_value_heads, config.linear_value_dim
    return {
        "linear_attn.in_proj_qkv.weight": ("mixer/in_proj_qkv", (config.conv_dim, hidden)),
        "linear_attn.in_proj_z.weight": ("mixer/in_proj_z", (values, hidden)),
        "linear_attn.in_proj_b.weight": ("mixer/in_proj_b", (heads, hidden)),
        "linear_attn.in_proj_a.weight": ("mixer/in_proj_a", (heads, hidden)),
        "linear_attn.conv1d.weight": ("mixer/conv", (config.conv_dim, 1, CONV_TAPS)),
        "linear_attn.A_log": ("mixer/A_log", (heads,)),
        "linear_attn.dt_bias": ("mixer/dt_bias", (heads,)),
        "linear_attn.norm.weight": ("mixer/norm", (config.linear_value_head_dim,)),
        "linear_attn.out_proj.weight": ("mixer/out_proj", (hidden, values)),
    }


def _attention(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, queries, keys = config.hidden_size, config.query_dim, config.kv_dim
    return {
        "self_attn.q_proj.weight": ("mixer/q_proj", (2 * queries, hidden)),  # A head is its query, then its gate.
        "self_attn.k_proj.weight": ("mixer/k_proj", (keys, hidden)),
        "self_attn.v_proj.weight": ("mixer/v_proj", (keys, hidden)),
        "self_attn.o_proj.weight": ("mixer/o_proj", (hidden, queries)),
        "self_attn.q_norm.weight": ("mixer/q_norm", (config.head_dim,)),
        "self_attn.k_norm.weight": ("mixer/k_norm", (config.head_dim,)),
    }


def _experts(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, experts = config.hidden_size, config.num_experts
    width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "mlp.gate.weight": ("mlp/router", (experts, hidden)),
        "mlp.experts.gate_up_proj": ("mlp/gate_up", (experts, 2 * width, hidden)),
        "mlp.experts.down_proj": ("mlp/down", (experts, hidden, width)),
        "mlp.shared_expert.gate_proj.weight": ("mlp/shared_gate_proj", (shared, hidden)),
        "mlp.shared_expert.up_proj.weight": ("mlp/shared_up_proj", (shared, hidden)),
        "mlp.shared_expert.down_proj.weight": ("mlp/shared_down_proj", (hidden, shared)),
        "mlp.shared_expert_gate.weight": ("mlp/shared_gate", (1, hidden)),
    }


def _dense(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, width = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_proj.weight": ("mlp/gate_proj", (width, hidden)),
        "mlp.up_proj.weight": ("mlp/up_proj", (width, hidden)),
        "mlp.down_proj.weight": ("mlp/down_proj", (hidden, width)),
    }
