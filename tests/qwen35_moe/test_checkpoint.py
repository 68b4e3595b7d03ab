import hashlib
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from qwen35_moe.checkpoint import Layout, export, load_params, num_parameters, seeded_params
from qwen35_moe.checkpoint.names import leaf_shapes
from qwen35_moe.config import Config
from tests.qwen35_moe import tiny
from tests.qwen35_moe.checkpoints import OTHERS, assert_same_bits, load_folder, rounded, wrapped, write_shards

LAYOUTS = [Layout(wrapped, fused) for wrapped in (False, True) for fused in (False, True)]


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


def test_a_small_checkpoint_with_its_tokenizer_is_a_folder_like_any_other(tmp_path):
    config = tiny.write_checkpoint(tmp_path / "a")
    params, _ = load_params(tmp_path / "a", config)
    assert jax.tree.structure(params) == jax.tree.structure(seeded_params(config))
    assert AutoTokenizer.from_pretrained(tmp_path / "a").encode("ab") == [97, 98]
    assert Config.from_hf(tmp_path / "a") == config
