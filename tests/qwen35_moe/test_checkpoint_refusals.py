import dataclasses
import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from isojax.errors import WeightsError
from qwen35_moe.checkpoint import export, load_params
from qwen35_moe.config import Config
from tests.qwen35_moe import tiny
from tests.qwen35_moe.checkpoints import (
    assert_same_bits,
    copy_folder,
    load_file_any,
    load_folder,
    write_shards,
)


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
