import dataclasses
import json

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from isojax.errors import ConfigError
from qwen35_moe.checkpoint import num_parameters
from qwen35_moe.config import Config
from tests.qwen35_moe import tiny

HF_CLASSES = {"qwen3_5_moe_text": Qwen3_5MoeTextConfig, "qwen3_5_text": Qwen3_5TextConfig}
ROPE = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
# Sizes of released models where they differ from the defaults of transformers, and their published parameter counts.
RELEASED = {
    "35B-A3B": (Qwen3_5MoeTextConfig, {}, 34_660_610_688),
    "397B-A17B": (
        Qwen3_5MoeTextConfig,
        {
            **{"hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "linear_num_value_heads": 64},
            **{"num_experts": 512, "num_experts_per_tok": 10},
            **{"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024},
        },
        396.346e9,
    ),
    "0.8B": (
        Qwen3_5TextConfig,
        {
            **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
            **{"linear_num_value_heads": 16, "intermediate_size": 3584, "tie_word_embeddings": True},
        },
        0.752e9,
    ),
    "9B": (Qwen3_5TextConfig, {}, 8.954e9),
}


def saved(config) -> dict:
    return json.loads(config.to_json_string())


def violations(source: dict) -> set[str]:
    with pytest.raises(ConfigError) as refusal:
        Config.from_hf(source)
    return {line.strip() for line in str(refusal.value).splitlines()[1:]}


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_give_the_published_parameter_counts(name):
    kind, sizes, parameters = RELEASED[name]
    config = Config.from_hf(saved(kind(rope_parameters=ROPE, **sizes)))
    assert num_parameters(config) == pytest.approx(parameters, rel=1e-3 if isinstance(parameters, float) else 0)
    assert (config.rotary_dim, config.compute_dtype, config.is_moe) == (64, "bfloat16", "A" in name)


def test_derived_sizes_are_those_of_the_specification():
    config = Config.from_hf(saved(Qwen3_5MoeTextConfig(rope_parameters=ROPE)))
    assert (config.query_dim, config.kv_dim, config.periods) == (4096, 512, 10)
    assert (config.linear_key_dim, config.linear_value_dim, config.conv_dim) == (2048, 4096, 8192)


@pytest.mark.parametrize("wrapper", [Qwen3_5MoeConfig, Qwen3_5Config])
def test_the_multimodal_wrapper_holds_the_same_text_model(wrapper):
    outer = saved(wrapper())
    outer["text_config"]["rope_parameters"] = ROPE
    inner = Config.from_hf(outer["text_config"])
    assert Config.from_hf(outer) == inner
    assert (Config.from_hf(outer).is_multimodal, inner.is_multimodal) == (True, False)


def test_it_reads_a_file_or_its_folder_and_gives_the_file_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.MOE))
    config = Config.from_hf(tmp_path)
    assert config == Config.from_hf(str(tmp_path / "config.json")) == Config.from_hf(tiny.MOE)
    assert config.to_hf() == tiny.MOE
    assert hash(config) == hash(Config.from_hf(tiny.MOE))


@pytest.mark.parametrize("source", [tiny.MOE, tiny.DENSE], ids=["moe", "dense"])
def test_a_config_made_of_sizes_is_one_that_transformers_and_we_read(source):
    read = Config.from_hf(source)
    sizes = {name: value for name, value in vars(read).items() if name != "source"}
    made = Config(**sizes).to_hf()
    assert Config.from_hf(made) == read
    theirs = HF_CLASSES[made["model_type"]](**made).to_dict()
    ours = HF_CLASSES[source["model_type"]](**source).to_dict()
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings", *sizes.keys() & ours.keys()):
        assert theirs[name] == ours[name], name


def test_the_text_models_tie_flag_counts_and_the_outer_one_only_where_that_is_silent():
    silent = {name: value for name, value in tiny.MOE.items() if name != "tie_word_embeddings"}
    for inner, outer, tied in ((True, False, True), (False, True, False), (None, True, True), (None, False, False)):
        text = silent if inner is None else silent | {"tie_word_embeddings": inner}
        config = Config.from_hf({"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": outer})
        assert config.tie_word_embeddings is tied
        written = config.to_hf()
        assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is tied


def test_all_violations_are_told_at_once():
    source = tiny.MOE | {"hidden_size": 0, "num_hidden_layers": 6, "num_experts_per_tok": 9, "hidden_act": "gelu"}
    source |= {"num_key_value_heads": 3, "linear_num_value_heads": 3, "rms_norm_eps": 0, "vocab_size": "512"}
    source |= {"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.3}}
    assert violations(source) == {
        "rope_theta is missing",
        "hidden_act is 'gelu', isojax computes 'silu'",
        "rope_type is 'yarn', isojax computes 'default'",
        "vocab_size is '512', expected a positive integer",
        "hidden_size is 0, expected a positive integer",
        "num_hidden_layers=6: expected whole periods of 4 layers",
        "num_attention_heads=4, num_key_value_heads=3: expected the same number of query heads for every key head",
        "linear_num_value_heads=3, linear_num_key_heads=2: expected the same number of value heads for every key head",
        "head_dim=64, partial_rotary_factor=0.3: expected to rotate an even number of dimensions of a head",
        "num_experts_per_tok=9, num_experts=8: expected at most all experts",
        "rms_norm_eps=0: expected a positive number",
    }


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({"layer_types": ["linear_attention"] * 8}, "layer_types[3] is 'linear_attention'"),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, "layer_types names 4 layers"),
        ({"full_attention_interval": 2}, "full_attention_interval is 2"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_isojax_does_not_compute_is_refused(changed, violation):
    (line,) = violations(tiny.MOE | changed)
    assert line.startswith(violation)


@pytest.mark.parametrize(
    "name", [name for name in tiny.MOE if name.startswith(("num_", "linear_num", "moe_", "vocab"))]
)
def test_a_missing_size_is_told_and_never_guessed(name):
    source = {key: value for key, value in tiny.MOE.items() if key != name}
    assert violations(source) == {f"{name} is missing"}


def test_other_models_are_refused_by_name():
    with pytest.raises(ConfigError, match="model_type is 'qwen3_next': isojax runs qwen3_5, "):
        Config.from_hf({"model_type": "qwen3_next"})
    with pytest.raises(ConfigError, match="has the text model in text_config, got None"):
        Config.from_hf({"model_type": "qwen3_5_moe"})
    with pytest.raises(ConfigError, match="num_hidden_layers=7"):
        Config(**{**vars(tiny.config()), "num_hidden_layers": 7})


def test_b091_words_are_those_of_the_tokenizer_and_have_a_row_each():
    assert tiny.config().num_words == 512
    assert dataclasses.replace(tiny.config(), tokenizer_size=500).num_words == 500
    with pytest.raises(ConfigError, match="tokenizer_size=513, vocab_size=512: expected a row"):
        dataclasses.replace(tiny.config(), tokenizer_size=513)
