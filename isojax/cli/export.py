"""From a run's checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import Any, Literal

from isojax.bits import digest
from isojax.errors import CheckpointError
from isojax.rl.checkpoint import load_params
from isojax.rl.config import Config
from qwen35_moe import Config as ModelConfig
from qwen35_moe.checkpoint import export as write
from qwen35_moe.checkpoint import load_params as read
from qwen35_moe.checkpoint import num_parameters


def export(checkpoint: Path, out: Path, dtype: Literal["file", "bfloat16", "float32"]) -> dict[str, Any]:
    """Writes `RUN/step_N` with the tokenizer and the names of the checkpoint that the run started from.

    Returns:
        `weights_digest`, as in the run's metrics, and `exported_digest`, of what the folder holds, read again: another
        one where `dtype` rounds.

    Raises:
        CheckpointError: If there is no such checkpoint, or what the run started from is gone.
        WeightsError: If `out` is in use.
    """
    params, notes = load_params(checkpoint)
    policy = Config.model_validate(notes["config"]).policy
    if not (policy.checkpoint / "config.json").is_file():
        raise CheckpointError(
            f"{policy.checkpoint}, which the run started from, is gone: put it back, names and tokenizer are there"
        )
    config = ModelConfig.from_hf(policy.checkpoint, compute_dtype=policy.dtype)
    _, manifest = read(policy.checkpoint, config)
    write(out, params, config, manifest, dtype=dtype)
    written, _ = read(out, config)
    return {
        "step": notes["step"],
        "out": out,
        "dtype": dtype,
        "parameters": num_parameters(config),
        "weights_digest": digest(params),
        "exported_digest": digest(written),
    }
