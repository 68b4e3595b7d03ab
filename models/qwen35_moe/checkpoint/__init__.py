"""Checkpoints of Hugging Face's form: read exactly, checked by name, written as released."""

from qwen35_moe.checkpoint.export import export
from qwen35_moe.checkpoint.load import Manifest, Params, load_params
from qwen35_moe.checkpoint.names import Layout, num_parameters
from qwen35_moe.checkpoint.seeded import seeded_params, seeded_tensors
from qwen35_moe.checkpoint.words import tokenizer_size

__all__ = [
    "Layout",
    "Manifest",
    "Params",
    "export",
    "load_params",
    "num_parameters",
    "seeded_params",
    "seeded_tensors",
    "tokenizer_size",
]
