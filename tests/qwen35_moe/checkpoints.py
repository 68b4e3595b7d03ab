"""Folders of checkpoints for tests, as released and as cut, and what is in them."""

import json

import jax
import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from qwen35_moe.checkpoint import export
from qwen35_moe.config import Config
from tests.qwen35_moe import tiny

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


def release(folder):
    """A folder as released: wrapped, fused, bfloat16 but for two kinds of tensors, with vision and MTP, in shards."""
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


def copy_folder(source, target):
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
