"""The server: flags that pass through, request options refused before vLLM sees them."""

import asyncio
import json

import pytest

from rollout_bridge.serve import RefuseUnsupported, arguments


def test_flags_pass_through_with_our_defaults_behind_them():
    flags = arguments(["--port", "8001", "--max-model-len=512"])
    assert flags[:3] == ["--port", "8001", "--max-model-len=512"]
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert flags[flags.index("--generation-config") + 1] == "vllm"
    assert json.loads(flags[flags.index("--additional-config") + 1]) == {"numerics": "exact"}


def test_what_the_user_says_counts():
    flags = arguments(["--generation-config=auto", "--numerics", "native", "--additional-config", '{"a": 1}'])
    assert flags.count("--generation-config") == 0
    assert json.loads(flags[flags.index("--additional-config") + 1]) == {"a": 1, "numerics": "native"}
    assert "--numerics" not in flags


def call(body: bytes, *, method="POST"):
    """The status and body of the answer, or what the application behind received."""
    received, sent = [], []

    async def application(scope, receive, send):
        while True:
            message = await receive()
            received.append(message.get("body", b""))
            if not message.get("more_body"):
                break

    halves = [body[: len(body) // 2], body[len(body) // 2 :]]
    messages = [{"type": "http.request", "body": half, "more_body": i == 0} for i, half in enumerate(halves)]

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(RefuseUnsupported(application)({"type": "http", "method": method}, receive, send))
    return sent[0]["status"] if sent else None, b"".join(received), sent[1]["body"] if sent else b""


@pytest.mark.parametrize("option", ["use_beam_search", "best_of"])
def test_options_that_go_around_our_sampler_get_400(option):
    status, _, answer = call(json.dumps({"prompt": "x", option: 2}).encode())
    assert status == 400
    assert option in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("body", [b'{"prompt": "x", "use_beam_search": false}', b"no json", b"[1]", b""])
def test_other_bodies_arrive_whole(body):
    status, received, _ = call(body)
    assert status is None
    assert received == body
