"""vLLM's OpenAI server over our worker."""

import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from rollout_bridge import set_environment

type Message = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]
type App = Callable[[Message, Receive, Send], Awaitable[None]]

_DEFAULTS = {"--generation-config": "vllm", "--logprobs-mode": "processed_logprobs"}
_REFUSED = ("use_beam_search", "best_of")


def serve(checkpoint: str, args: Sequence[str] = ()) -> None:
    """Serves a checkpoint over vLLM's OpenAI API until it is interrupted.

    Args:
        checkpoint: A Hugging Face folder.
        args: Flags of `vllm serve`; and `--numerics exact|native`.
    """
    set_environment()
    sys.argv = ["vllm", "serve", checkpoint, *arguments(args)]
    from rollout_bridge import platform

    platform.use()
    from vllm.entrypoints.cli.main import main

    main()


def arguments(args: Sequence[str]) -> list[str]:
    """The flags that vLLM gets: the user's, our defaults, and which contract to bind."""
    out, extra, numerics = [], {}, "exact"
    flags = iter(args)
    for flag in flags:
        name, _, value = flag.partition("=")
        if name in ("--numerics", "--additional-config"):
            value = value or next(flags, "")
            if name == "--numerics":
                numerics = value
            else:
                extra = json.loads(value)
        else:
            out.append(flag)
    given = {flag.partition("=")[0] for flag in out}
    for name, value in _DEFAULTS.items():
        if name not in given:
            out += [name, value]
    extra["numerics"] = numerics
    return [*out, "--additional-config", json.dumps(extra), "--middleware", "rollout_bridge.serve.RefuseUnsupported"]


class RefuseUnsupported:
    """Refuses, with HTTP 400, request options that vLLM would carry out around our sampler or drop."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST":
            return await self.app(scope, receive, send)
        messages, body = [], b""
        while True:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        if refused := _refused(body):
            return await _answer(send, f"{', '.join(refused)} is not served: sample with n, or use temperature=0")

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        return await self.app(scope, again, send)


def _refused(body: bytes) -> list[str]:
    try:
        request = json.loads(body)
    except ValueError:
        return []  # vLLM answers what is no JSON.
    return [name for name in _REFUSED if request.get(name)] if isinstance(request, dict) else []


async def _answer(send: Send, message: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
