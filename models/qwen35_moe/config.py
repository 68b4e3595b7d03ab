"""The shape of a Qwen3.5 text model, read from the `config.json` of a checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isojax.errors import ConfigError

PERIOD = 4
"""Layers of one period: three of Gated DeltaNet, then one of full attention."""

CONV_TAPS = 4

type ComputeDtype = Literal["float32", "bfloat16"]

_MOE_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
_DENSE_TYPES = ("qwen3_5_text", "qwen3_5")
_WRAPPERS = ("qwen3_5_moe", "qwen3_5")

_MIXER_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_DENSE_SIZES = ("intermediate_size",)

# What the family may vary and isojax does not compute, with the values that it does; an absent key is one of them.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "norm_topk_prob": (True,),
    "mlp_only_layers": ([], None),
    "linear_conv_kernel_dim": (CONV_TAPS,),
    "full_attention_interval": (PERIOD,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}

# Fields, what must hold of them, and how a violation goes on after their values.
_RULES = (
    (("num_hidden_layers",), lambda layers: layers % PERIOD == 0, f"expected whole periods of {PERIOD} layers"),
    (
        ("num_attention_heads", "num_key_value_heads"),
        lambda queries, keys: queries % keys == 0,
        "expected the same number of query heads for every key head",
    ),
    (
        ("linear_num_value_heads", "linear_num_key_heads"),
        lambda values, keys: values % keys == 0,
        "expected the same number of value heads for every key head",
    ),
    (
        ("head_dim", "partial_rotary_factor"),
        lambda head, factor: 0 < factor <= 1 and head * factor % 2 == 0,
        "expected to rotate an even number of dimensions of a head",
    ),
    (("num_experts_per_tok", "num_experts"), lambda top_k, experts: top_k <= experts, "expected at most all experts"),
    (
        ("tokenizer_size", "vocab_size"),
        lambda words, rows: words is None or 0 < words <= rows,
        "expected a row of the output head for every word of the tokenizer",
    ),
    (("rope_theta",), lambda theta: theta > 1, "expected more than 1"),
    (("rms_norm_eps",), lambda eps: eps > 0, "expected a positive number"),
    (("tie_word_embeddings",), lambda tied: isinstance(tied, bool), "expected true or false"),
    (("compute_dtype",), lambda dtype: dtype in ("float32", "bfloat16"), "expected float32 or bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the text model, by the names that Hugging Face gives them; hashable, so it can be static under `jit`.

    Attributes:
        num_experts: Routed experts of a layer; 0 in a dense model, as the other sizes of experts.
        intermediate_size: Width of the dense MLP; 0 in a model with experts.
        compute_dtype: What matrices are cast to and activations are kept in; parameters stay float32.
        tokenizer_size: Ids below it are words; rows of the output head from there on are padding. None: all are words.
        source: The JSON text of the `config.json` it was read from; carried through on export, not compared.

    Raises:
        ConfigError: If sizes do not fit together; lists all violations.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    rope_theta: float
    partial_rotary_factor: float = 0.25
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    compute_dtype: ComputeDtype = "bfloat16"
    tokenizer_size: int | None = None
    source: str = dataclasses.field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _refuse(_violations(vars(self), _MOE_SIZES if self.num_experts else _DENSE_SIZES))

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def is_multimodal(self) -> bool:
        """Whether it was read from a multimodal config, whose text tensors begin with `model.language_model.`."""
        return bool(self.source) and json.loads(self.source)["model_type"] in _WRAPPERS

    @property
    def num_words(self) -> int:
        """Ids that can be drawn: what log-probabilities, entropies and samples are of."""
        return self.tokenizer_size or self.vocab_size

    @property
    def periods(self) -> int:
        return self.num_hidden_layers // PERIOD

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of an attention head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def query_dim(self) -> int:
        """Width of all query heads, without their gates."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads, and of all value heads, of attention."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear_key_dim(self) -> int:
        """Width of all key heads, and of all query heads, of Gated DeltaNet."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all value heads of Gated DeltaNet."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values of Gated DeltaNet."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any], *, compute_dtype: ComputeDtype = "bfloat16") -> "Config":
        """Reads a Hugging Face config: a dict, a `config.json`, or the folder that holds one.

        Takes the text models `qwen3_5_moe_text` and `qwen3_5_text` and the multimodal wrappers around them
        (`text_config`). Whether the output head is tied is what the text config says; the outer flag counts
        only where that is silent.

        Raises:
            ConfigError: If anything is missing, not computed by isojax, or does not fit; lists all violations.
        """
        outer: dict[str, Any] = dict(source) if isinstance(source, Mapping) else _read(Path(source))
        model_type = outer.get("model_type")
        if model_type not in _MOE_TYPES + _DENSE_TYPES:
            known = ", ".join(sorted(_MOE_TYPES + _DENSE_TYPES))
            raise ConfigError(f"model_type is {model_type!r}: isojax runs {known}")
        text = outer.get("text_config") if model_type in _WRAPPERS else outer
        if not isinstance(text, Mapping):
            raise ConfigError(f"model_type {model_type} has the text model in text_config, got {text!r}")

        mlp_sizes = _MOE_SIZES if model_type in _MOE_TYPES else _DENSE_SIZES
        rope = text.get("rope_parameters") or {}
        optional = ("rope_theta", "partial_rotary_factor", "rms_norm_eps")
        values = {name: text[name] for name in _MIXER_SIZES + mlp_sizes + optional if name in text}
        values |= {name: rope[name] for name in optional if name in rope}
        values["tie_word_embeddings"] = text.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))
        values["compute_dtype"] = compute_dtype

        required = (*_MIXER_SIZES, *mlp_sizes, "rope_theta")  # A missing theta would be 10,000 in transformers.
        missing = [f"{name} is missing" for name in required if name not in values]
        _refuse(missing + _unsupported(text, rope, values) + _violations(values, mlp_sizes))
        return cls(**values, source=json.dumps(outer))

    def to_hf(self) -> dict[str, Any]:
        """The model's `config.json`: the one that it was read from, or else a text model's made from the sizes.

        In a multimodal config the outer tie flag becomes the text model's, which is the one that counts.
        """
        if self.source:
            config = json.loads(self.source)
            if self.is_multimodal:
                config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = self.tie_word_embeddings
            return config
        sizes = _MIXER_SIZES + (_MOE_SIZES if self.is_moe else _DENSE_SIZES)
        return {
            "architectures": ["Qwen3_5MoeForCausalLM" if self.is_moe else "Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_moe_text" if self.is_moe else "qwen3_5_text",
            **{name: getattr(self, name) for name in (*sizes, "rms_norm_eps", "tie_word_embeddings")},
            "hidden_act": "silu",
            "attention_bias": False,
            "linear_conv_kernel_dim": CONV_TAPS,
            "layer_types": [layer_type(layer) for layer in range(self.num_hidden_layers)],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                # Text has three equal position rows: any split of the frequencies over them is the same rotation.
                "mrope_section": [(self.rotary_dim // 2 + left) // 3 for left in (2, 1, 0)],
                "mrope_interleaved": True,
            },
            "dtype": "bfloat16",
            "mamba_ssm_dtype": "float32",
        }


def is_attention(layer: int) -> bool:
    """Whether a layer is the last of its period, the one of full attention."""
    return (layer + 1) % PERIOD == 0


def layer_type(layer: int) -> str:
    """A layer's entry in `layer_types`."""
    return "full_attention" if is_attention(layer) else "linear_attention"


def _read(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json" if path.is_dir() else path).read_text())


def _unsupported(text: Mapping[str, Any], rope: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """What the config asks for and isojax does not compute."""
    found = [
        f"{name} is {text[name]!r}, isojax computes {' or '.join(map(repr, fixed))}"
        for name, fixed in _FIXED.items()
        if name in text and text[name] not in fixed
    ]
    layers = text.get("layer_types")
    if layers is not None:
        found += [
            f"layer_types[{i}] is {got!r}, isojax computes periods of three linear layers and a full one"
            for i, got in enumerate(layers)
            if got != layer_type(i)
        ][:1]
        if len(layers) != values.get("num_hidden_layers", len(layers)):
            found.append(f"layer_types names {len(layers)} layers, num_hidden_layers={values['num_hidden_layers']}")
    if rope.get("rope_type", "default") != "default":
        found.append(f"rope_type is {rope['rope_type']!r}, isojax computes 'default'")
    return found


def _violations(values: Mapping[str, Any], mlp_sizes: tuple[str, ...]) -> list[str]:
    """What does not fit in the values that are there."""
    wrong = {
        name: f"{name} is {values[name]!r}, expected a positive integer"
        for name in _MIXER_SIZES + mlp_sizes
        if name in values and not (type(values[name]) is int and values[name] > 0)
    }
    found = list(wrong.values())
    for names, fits, expected in _RULES:
        if all(name in values and name not in wrong for name in names) and not fits(*(values[name] for name in names)):
            found.append(f"{', '.join(f'{name}={values[name]!r}' for name in names)}: {expected}")
    return found


def _refuse(violations: list[str]) -> None:
    if violations:
        raise ConfigError("\n  ".join([f"{len(violations)} violations in the model config:", *violations]))
