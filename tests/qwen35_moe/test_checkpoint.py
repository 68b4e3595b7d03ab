import dataclasses
import hashlib
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import Layout, export, load_params, num_parameters, seeded_params
from qwen35_moe.checkpoint.names import leaf_shapes
from qwen35_moe.config import Config
from tests.qwen35_moe import tiny

LAYOUTS = [Layout(wrapped, fused) for wrapped in (False, True) for fused in (False, True)]
# Of the multimodal wrapper: what is carried through, in names and dtypes of releases.
OTHERS = {
    "model.visual.patch_embed.proj.weight": np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "mtp.fc.weight": np.full((2, 3), -0.0, np.float32),
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": np.ones((2, 2), ml_dtypes.bfloat16),
}


def wrapped(text: dict, **outer) -> dict:
    kind = text["model_type"].removesuffix("_text")
    return {"model_type": kind, "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, **outer}


def assert_same_bits(got, want):
    got, want = ({jax.tree_util.keystr(k): np.asarray(v) for k, v in _flat(tree)} for tree in (got, want))
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert got[name].shape == want[name].shape
        assert got[name].tobytes() == want[name].tobytes(), name


def _flat(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def rounded(tree):
    """The nearest bfloat16 of every value, ties to even, by torch."""
    return jax.tree.map(lambda x: torch.tensor(np.asarray(x)).bfloat16().float().numpy(), tree)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder as released: wrapped, fused, bfloat16 but for two kinds of tensors, with vision and MTP, in shards."""
    folder = tmp_path_factory.mktemp("released") / "model"
    config = Config.from_hf(wrapped(tiny.MOE))
    plain = folder.parent / "plain"
    export(plain, tiny.params(), config)
    tensors = load_file_any(plain / "model.safetensors") | OTHERS
    (folder / "tokenizer.json").parent.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text((plain / "config.json").read_text())
    write_shards(folder, tensors, 3)
    return folder


def load_file_any(file):
    with safe_open(file, "numpy") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118


def load_folder(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file_any(file).items()}


def write_shards(folder, tensors, count):
    names = sorted(tensors)
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_seeded_weights_are_those_of_the_reference_model():
    tensors = tiny.tensors()
    digest = hashlib.sha256(b"".join(tensors[name].tobytes() for name in sorted(tensors)))
    assert digest.hexdigest() == tiny.WEIGHTS_SHA256
    assert num_parameters(tiny.config()) == 2_580_080
    assert len(tensors) == 141


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_b103_every_layout_brings_back_every_bit_and_name(layout, tmp_path):
    export(tmp_path / "a", tiny.params(), tiny.config(), layout=layout, dtype="float32")
    params, manifest = load_params(tmp_path / "a", tiny.config())
    assert_same_bits(params, tiny.params())
    assert (manifest.layout, manifest.passed_through, set(manifest.dtypes.values())) == (layout, (), {"F32"})
    names = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert len(names) == (141 if layout.fused else 317)
    assert any(name.startswith("model.language_model.") for name in names) == layout.wrapped


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_transformers_loads_every_layout_and_computes_the_reference_logits(layout, tmp_path):
    export(tmp_path / "a", tiny.params(), tiny.config(), layout=layout, dtype="float32")
    model, info = Qwen3_5MoeForCausalLM.from_pretrained(
        tmp_path / "a", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(torch.tensor(tiny.tokens())).logits.numpy()
    # float64 values of the reference model; float32 is within 1e-4 of them.
    np.testing.assert_allclose(logits[0, 0, :4], [0.4136776076, 0.1969598667, 0.3994475824, -1.2527405518], atol=1e-4)
    np.testing.assert_allclose(logits[1, 71, :4], [-0.6172196033, 0.1840443748, 0.6833498184, -0.2903127483], atol=1e-4)
    want = [246, 222, 370, 416, 115, 195, 47, 161, 298, 41, 467, 116, 263, 463, 160, 401]
    assert logits[0, :16].argmax(-1).tolist() == want


def test_transformers_saves_what_loads_to_the_same_bits(tmp_path):
    export(tmp_path / "a", tiny.params(), tiny.config(), dtype="float32")
    Qwen3_5MoeForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).save_pretrained(tmp_path / "b")
    assert_same_bits(load_params(tmp_path / "b", Config.from_hf(tmp_path / "b"))[0], tiny.params())


def test_a_dense_tied_member_makes_the_same_trip(tmp_path):
    config = tiny.dense_config()
    export(tmp_path / "a", tiny.dense_params(), config, dtype="float32")
    model, info = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "b")
    assert_same_bits(load_params(tmp_path / "b", Config.from_hf(tmp_path / "b"))[0], tiny.dense_params())


def test_an_export_of_a_release_has_its_names_dtypes_and_bytes(released, tmp_path):
    config = Config.from_hf(released)
    params, manifest = load_params(released, config)
    assert manifest.layout == Layout(wrapped=True, fused=True)
    assert set(manifest.passed_through) == set(OTHERS)
    export(tmp_path / "a", params, config, manifest)
    got, want = load_folder(tmp_path / "a"), load_folder(released)
    assert_same_bits(got, want)
    assert {n for n, v in got.items() if v.dtype == np.float32} == {
        "mtp.fc.weight",
        *(n for n in got if n.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))),
    }
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == json.loads(
        (released / "config.json").read_text()
    )


def test_bfloat16_is_rounded_to_nearest_ties_to_even(tmp_path):
    export(tmp_path / "a", tiny.params(), tiny.config(), dtype="bfloat16")
    params, manifest = load_params(tmp_path / "a", tiny.config())
    assert_same_bits(params, rounded(tiny.params()))
    assert set(manifest.dtypes.values()) == {"BF16"}


def test_unknown_dtypes_of_files_are_kept_tensor_by_tensor(released, tmp_path):
    """Later releases store A_log and the norm of Gated DeltaNet in bfloat16."""
    tensors = load_folder(released)
    name = "model.language_model.layers.0.linear_attn.A_log"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    write_shards(tmp_path, tensors, 2)
    config = Config.from_hf(released)
    params, manifest = load_params(tmp_path, config)
    export(tmp_path / "a", params, config, manifest)
    assert_same_bits(load_folder(tmp_path / "a"), tensors)


def test_large_checkpoints_are_cut_into_shards_that_load(tmp_path):
    export(tmp_path / "a", tiny.params(), tiny.config(), dtype="float32", shard_bytes=2_000_000)
    shards = sorted(tmp_path.glob("a/*.safetensors"))
    assert len(shards) > 3
    assert max(shard.stat().st_size for shard in shards) < 2_020_000
    assert_same_bits(load_params(tmp_path / "a", tiny.config())[0], tiny.params())
    _, info = Qwen3_5MoeForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info.values()), info


def test_a_released_folder_loads_in_the_multimodal_class_of_transformers(tmp_path):
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    config = Config.from_hf(wrapped(tiny.MOE, vision_config=vision))
    export(tmp_path / "a", tiny.params(), config)
    _, info = Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert all(name.startswith("model.visual.") for name in info.pop("missing_keys"))
    assert not any(info.values()), info


@pytest.mark.parametrize("inner", [True, False])
def test_b094_the_text_model_says_whether_its_head_is_tied(inner, tmp_path):
    config = Config.from_hf(wrapped(tiny.MOE | {"tie_word_embeddings": inner}, tie_word_embeddings=not inner))
    assert ("lm_head",) in leaf_shapes(config) or inner
    params = {k: v for k, v in tiny.params().items() if k != "lm_head" or not inner}
    export(tmp_path / "a", params, config, dtype="float32")
    assert_same_bits(load_params(tmp_path / "a", Config.from_hf(tmp_path / "a"))[0], params)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["tie_word_embeddings"] is inner


def test_a_head_in_the_file_of_a_tied_model_must_be_the_embedding(tmp_path):
    config = tiny.dense_config()
    export(tmp_path / "a", tiny.dense_params(), config)
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file_any(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    assert "lm_head" not in load_params(tmp_path / "a", config)[0]
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, file)
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(tmp_path / "a", config)


def test_missing_unknown_and_misshapen_tensors_are_all_named_at_once(released, tmp_path):
    tensors = load_folder(released)
    tensors["model.language_model.layers.9.input_layernorm.weight"] = np.zeros(128, np.float32)
    del tensors["model.language_model.layers.3.self_attn.q_norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.language_model.norm.weight"] = tensors["model.language_model.norm.weight"].astype(np.float16)
    write_shards(tmp_path, tensors, 2)
    with pytest.raises(WeightsError) as refusal:
        load_params(tmp_path, Config.from_hf(released))
    lines = {line.strip() for line in str(refusal.value).splitlines()[1:]}
    assert lines == {
        "model.language_model.layers.9.input_layernorm.weight is not part of the model that the config describes",
        "model.language_model.layers.3.self_attn.q_norm.weight is missing",
        "lm_head.weight is [511, 128], the config asks for [512, 128]",
        "model.language_model.norm.weight is F16, expected F32 or BF16",
    }


def test_mixed_forms_of_names_are_refused(released, tmp_path):
    tensors = load_folder(released)
    tensors["model.norm.weight"] = tensors.pop("model.language_model.norm.weight")
    write_shards(tmp_path, tensors, 1)
    with pytest.raises(WeightsError, match="mixes forms of names"):
        load_params(tmp_path, Config.from_hf(released))


@pytest.mark.parametrize("cut", [1, 1_000_000])
def test_b106_a_shard_that_was_cut_is_refused_by_the_names_in_it(released, cut, tmp_path):
    copy_folder(released, tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-cut])
    with pytest.raises(WeightsError, match=rf"\n  [\w.]+ is cut off: {re.escape(str(shard))} is \d+ bytes too short"):
        load_params(tmp_path, Config.from_hf(released))
    shard.write_bytes(content + b"\0")
    with pytest.raises(WeightsError, match="1 bytes after its last tensor"):
        load_params(tmp_path, Config.from_hf(released))
    shard.write_bytes(content[:100])
    with pytest.raises(WeightsError, match="cut off inside its header"):
        load_params(tmp_path, Config.from_hf(released))
    shard.unlink()
    with pytest.raises(WeightsError, match=r"is missing: there is no .*00002-of-00003"):
        load_params(tmp_path, Config.from_hf(released))


def test_b106_a_shard_that_is_a_link_is_accepted(released, tmp_path):
    copy_folder(released, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    config = Config.from_hf(released)
    assert_same_bits(load_params(tmp_path / "snapshot", config)[0], load_params(released, config)[0])


def test_an_index_that_disagrees_with_its_shards_is_refused(released, tmp_path):
    copy_folder(released, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    one, two, three, *_ = content["weight_map"]
    content["weight_map"][one] = content["weight_map"][two]
    del content["weight_map"][two]
    content["weight_map"][three] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError) as refusal:
        load_params(tmp_path, Config.from_hf(released))
    for name in (one, two, three, "../elsewhere.safetensors"):
        assert name in str(refusal.value)


def test_a_folder_with_both_one_file_and_an_index_is_refused(released, tmp_path):
    copy_folder(released, tmp_path)
    save_file({"a": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="holds both"):
        load_params(tmp_path, Config.from_hf(released))


def test_parameters_that_are_not_the_configs_are_not_exported(tmp_path):
    params = dict(tiny.params(), extra=np.zeros(1, np.float32), norm=np.zeros(64, np.float32))
    del params["lm_head"]
    params["embed_tokens"] = np.asarray(params["embed_tokens"]).astype(np.float64)
    with pytest.raises(WeightsError) as refusal:
        export(tmp_path / "a", params, tiny.config())
    lines = {line.strip() for line in str(refusal.value).splitlines()[1:]}
    assert lines == {
        "extra is not a parameter of the model",
        "lm_head is missing",
        "norm is float32[64], expected float32[128]",
        "embed_tokens is float64[512, 128], expected float32[512, 128]",
    }


def test_nothing_is_left_of_an_export_that_failed(released, tmp_path):
    config = Config.from_hf(released)
    params, manifest = load_params(released, config)
    copy_folder(released, tmp_path / "source")
    (tmp_path / "source" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="was not written"):
        export(tmp_path / "a", params, config, dataclasses.replace(manifest, folder=tmp_path / "source"))

    class Broken:
        def save_pretrained(self, folder, /):
            raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        export(tmp_path / "a", params, config, manifest, tokenizer=Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_export_never_overwrites(released):
    config = Config.from_hf(released)
    with pytest.raises(WeightsError, match="never overwritten"):
        export(released, tiny.params(), config)


def test_a_small_checkpoint_with_its_tokenizer_is_a_folder_like_any_other(tmp_path):
    config = tiny.write_checkpoint(tmp_path / "a")
    params, _ = load_params(tmp_path / "a", config)
    assert jax.tree.structure(params) == jax.tree.structure(seeded_params(config))
    assert AutoTokenizer.from_pretrained(tmp_path / "a").encode("ab") == [97, 98]
    assert Config.from_hf(tmp_path / "a") == config


def copy_folder(source, target):
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
