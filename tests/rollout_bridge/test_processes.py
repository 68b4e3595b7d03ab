"""Engines in a process of their own: `LLM(path)`, and the OpenAI server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import isojax
from isojax.models import from_pretrained
from isojax.rl.tokenizer import byte_tokenizer
from qwen35_moe import rollout_params
from qwen35_moe.checkpoint import export
from rollout_bridge import LLM
from rollout_bridge.rollouts import Rollouts
from rollout_bridge.weights import digests
from tests.bits import bits
from tests.qwen35_moe import tiny
from tests.rollout_bridge.engines import SIZES, assert_trainer_agrees, prompts, sample, trainer_scores

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    tiny.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint):
    return from_pretrained(checkpoint)


def test_an_engine_of_its_own_process_has_the_trainers_bits(checkpoint, model):
    llm = LLM(checkpoint, **SIZES)
    try:
        assert llm.agree(model)
        outputs = llm.generate(prompts(5, 70, 130, seed=60), sample(n=2), use_tqdm=False)
        assert_trainer_agrees(model, outputs)
        moved = from_pretrained(checkpoint)
        moved.weights["norm"][...] = model.params()["norm"] + np.float32(0.25)
        assert llm.update_weights(moved) == 1  # Through a file, by fingerprint.
        outputs = llm.generate(prompts(5, 70, 130, seed=60), sample(), use_tqdm=False)
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 0]
        assert_trainer_agrees(moved, outputs)
    finally:
        llm.close()


@pytest.fixture(scope="module")
def server(checkpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    flags += ["--host=127.0.0.1", f"--port={port}", "--served-model-name=small", "--return-tokens-as-token-ids"]
    command = [Path(sys.executable).with_name("isojax"), "serve", checkpoint, *flags]
    process = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            break
        except OSError:
            time.sleep(1)
    yield url
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert ended(process.pid), "a process of the server lives on"


def ended(group: int, seconds: int = 30) -> bool:
    """Whether all processes of a group end in this time."""
    for _ in range(10 * seconds):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def post(url: str, **body) -> tuple[int, dict]:
    request = urllib.request.Request(
        url, json.dumps({"model": "small"} | body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_server_returns_the_trainers_bits(server, model):
    [prompt] = prompts(70, seed=61)
    ids = [token % 250 for token in prompt["prompt_token_ids"]]
    options = {"max_tokens": 12, "temperature": 0.8, "logprobs": 2, "seed": 3, "return_token_ids": True}
    status, answer = post(f"{server}/v1/completions", prompt=ids, **options)
    assert status == 200, answer
    [choice] = answer["choices"]
    want = isojax.logprobs(model, jnp.asarray([[*ids, *choice["token_ids"]]]), temperature=0.8)[0, 70:]
    got = np.array(choice["logprobs"]["token_logprobs"], np.float32)
    assert bits(got).tolist() == bits(want).tolist()
    for listed in choice["logprobs"]["top_logprobs"]:
        assert len(listed) in (2, 3)  # B083: the drawn token once.


def test_the_server_chats(server):
    chat = [{"role": "user", "content": "2+2="}]
    status, answer = post(f"{server}/v1/chat/completions", messages=chat, max_tokens=5, logprobs=True, top_logprobs=3)
    assert status == 200, answer
    content = answer["choices"][0]["logprobs"]["content"]
    assert content
    for entry in content:
        tokens = [top["token"] for top in entry["top_logprobs"]]
        assert len(tokens) == len(set(tokens)) == 3


def test_weights_come_over_http_and_old_prefixes_are_forgotten(server, model, checkpoint):
    # vLLM's protocol; nobody resets the prefix cache (B101).
    params = model.params() | {"norm": model.params()["norm"] + np.float32(0.25)}
    export(checkpoint.parent / "moved", params, model.config, tokenizer=byte_tokenizer())  # The same words.
    moved = from_pretrained(checkpoint.parent / "moved")  # The file rounds.
    ids = [token % 250 for token in prompts(150, seed=62)[0]["prompt_token_ids"]]
    options = {"max_tokens": 5, "temperature": 0.8, "logprobs": 0, "seed": 3, "return_token_ids": True}
    assert post(f"{server}/v1/completions", prompt=ids, **options)[0] == 200
    assert post(f"{server}/start_weight_update")[0] == 200
    assert post(f"{server}/update_weights", update_info={"path": str(checkpoint.parent / "moved")})[0] == 200
    assert post(f"{server}/finish_weight_update", weight_version="1")[0] == 200
    status, answer = post(f"{server}/v1/completions", prompt=ids, **options)
    assert status == 200, answer
    [choice] = answer["choices"]
    [want] = trainer_scores(moved, [[*ids, *choice["token_ids"]]], 0.8)
    got = np.array(choice["logprobs"]["token_logprobs"], np.float32)
    assert bits(got).tolist() == bits(want[149:]).tolist()
    _, answer = post(f"{server}/weight_checker", action="checksum")
    assert answer["checksums"] == digests(rollout_params(moved.params(), moved.config, moved.ops))


def test_prompts_of_text_go_through_the_checkpoints_tokenizer(model):
    engine = Rollouts(model, SIZES, {"max_tokens": 6, "temperature": 1.0}, chat=True)
    try:
        outputs = engine.rollout(["2+2=", "hello"], [1, 2])
        assert all(output.outputs[0].text is not None for output in outputs)
        assert len(outputs[0].prompt_token_ids) > 4
        assert_trainer_agrees(model, outputs)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"bad_words": ["a"]},
        {"structured_outputs": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
        {"use_beam_search": True},
        {"logprobs": 3, "prompt_logprobs": 1, "top_k": 4},
    ],
)
def test_the_server_refuses_what_is_not_served_with_400(server, options):
    status, answer = post(f"{server}/v1/completions", prompt=[1, 2, 3], **({"max_tokens": 4} | options))
    assert status == 400, answer
    assert "not served" in answer["error"]["message"] or "scored without" in answer["error"]["message"]
    status, answer = post(f"{server}/v1/completions", prompt=[1, 2, 3], max_tokens=2)
    assert status == 200, answer
