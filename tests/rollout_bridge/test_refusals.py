"""What the engine does not do is refused before weights load: the folder here has none."""

import json
import os
import subprocess
import sys

import pytest

import rollout_bridge
from isojax.errors import ConfigError, ShardingError
from tests.rollout_bridge.engines import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("no_weights")
    (path / "config.json").write_text(json.dumps(config().to_hf()))
    return path


def start(folder, **options):
    return rollout_bridge.LLM(folder, max_model_len=256, **options)


REFUSED = {
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "dtype": {"dtype": "float16"},
    "quantization": {"quantization": "fp8"},
    "LoRA": {"enable_lora": True},
    "prefix_match_unit=48": {"prefix_match_unit": 48},
    "block_size=32": {"block_size": 32},
    "logprobs_mode=raw_logprobs": {"logprobs_mode": "raw_logprobs"},
    "logits_processors": {"logits_processors": ["some.module:Processor"]},
    "Chunked prefill": {"enable_chunked_prefill": False},
}


@pytest.mark.parametrize("named", REFUSED)
def test_an_option_is_refused_by_name(folder, named):
    with pytest.raises(ConfigError, match=named):
        start(folder, **REFUSED[named])


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallelism_is_refused_by_name(folder, name):
    with pytest.raises(ShardingError, match=f"{name}=2"):
        start(folder, **{name: 2})


def test_every_violation_is_named_at_once(folder):
    with pytest.raises(ConfigError) as refusal:
        start(folder, tensor_parallel_size=2, dtype="float16", kv_cache_dtype="fp8", prefix_match_unit=48)
    for named in ("tensor_parallel_size=2", "dtype=float16", "kv_cache_dtype=fp8", "prefix_match_unit=48"):
        assert named in str(refusal.value)


def fresh_process(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_the_plugin_is_inert_unless_asked():
    code = (
        "import sys, rollout_bridge as r;"
        "print(r.register_platform(), r.register_models(), 'jax' in sys.modules, 'vllm' in sys.modules)"
    )
    assert fresh_process(code, ISOJAX_VLLM="") == "None None False False"
    assert fresh_process(code, ISOJAX_VLLM="1").startswith("rollout_bridge.platform.JaxPlatform")


def test_ours_becomes_the_platform_also_where_vllm_was_imported_before():
    code = (
        "from vllm import SamplingParams; import vllm.platforms as p, vllm.config.vllm as c; old = p.current_platform;"
        "from rollout_bridge import LLM; from rollout_bridge.platform import JaxPlatform as J;"
        "print(isinstance(old, J), isinstance(p.current_platform, J), isinstance(c.current_platform, J))"
    )
    assert fresh_process(code, ISOJAX_VLLM="") == "False True True"
