"""What a rollout engine returned, read strictly: nothing is repaired, padded or dropped."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int32

from isojax.errors import SamplingError, WeightsError


@runtime_checkable
class Completion(Protocol):
    """What is read of a `vllm.CompletionOutput`."""

    token_ids: Sequence[int]
    logprobs: Any
    finish_reason: str | None
    weight_versions: Any


@runtime_checkable
class Request(Protocol):
    """What is read of a `vllm.RequestOutput`."""

    request_id: str
    prompt_token_ids: Any
    outputs: Any
    num_cached_tokens: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one prompt.

    Attributes:
        prompt: Index of the prompt in the batch.
        sample: Index of the completion among those of its prompt.
        prompt_tokens: Token ids of the prompt, as the engine saw them.
        tokens: Sampled token ids, as sampled: never decoded and encoded again.
        logprobs: Of each sampled token, as the engine returned them.
        versions: Version of the weights that sampled each token.
        cached: Prompt tokens that the engine took from its prefix cache.
    """

    prompt: int
    sample: int
    prompt_tokens: Int32[np.ndarray, " prompt"]
    tokens: Int32[np.ndarray, " sampled"]
    logprobs: Float[np.ndarray, " sampled"]
    versions: Int32[np.ndarray, " sampled"]
    cached: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


def read_samples(outputs: Sequence[Request]) -> Iterator[Sample]:
    """The samples of `outputs` in (prompt, sample) order, whatever order they finished in.

    Raises:
        SamplingError: If a sampled token has no finite log-probability, or a completion has no
            token: rewards and losses of such a batch would be about something else.
        WeightsError: If a completion does not say which weights sampled each of its tokens.
    """
    for prompt, output in enumerate(outputs):
        for position, completion in enumerate(output.outputs):
            where = f"prompt {prompt}, sample {position} (request {output.request_id})"
            if not completion.token_ids or completion.finish_reason not in ("stop", "length"):
                raise SamplingError(
                    f"{where} has {len(completion.token_ids)} sampled tokens and ended by"
                    f" {completion.finish_reason!r}: leave the request out of the batch"
                )
            yield Sample(
                prompt=prompt,
                sample=position,
                prompt_tokens=np.array(output.prompt_token_ids, np.int32),
                tokens=np.array(completion.token_ids, np.int32),
                logprobs=_logprobs(completion, where),
                versions=_versions(completion, where),
                cached=output.num_cached_tokens or 0,
            )


def _logprobs(completion: Completion, where: str) -> np.ndarray:
    if completion.logprobs is None:
        raise SamplingError(f"{where} came without log-probabilities: sample with rollout_bridge.LLM, or logprobs=0")
    if len(completion.logprobs) != len(completion.token_ids):
        raise SamplingError(
            f"{where} has {len(completion.token_ids)} tokens and {len(completion.logprobs)} log-probabilities:"
            " one is owed for each, none is filled in"
        )
    values = []
    for position, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        found = entry.get(token)
        if found is None or not math.isfinite(found.logprob):
            got = "none" if found is None else found.logprob
            raise SamplingError(f"{where}: token {token} at output position {position} has log-probability {got}")
        values.append(found.logprob)
    return np.array(values, np.float32)


def _versions(completion: Completion, where: str) -> np.ndarray:
    """The version of every token, from vLLM's spans."""
    versions = np.full(len(completion.token_ids), -1, np.int32)
    spans = completion.weight_versions or ()
    labels = [str(span.version) for span in spans]
    for span, label in zip(spans, labels, strict=True):
        number = label.removeprefix("v")
        versions[span.start : span.end] = int(number) if number.isdigit() else -1
    if (versions < 0).any():
        found = f"weights labelled {', '.join(labels)}" if labels else "weights without a version"
        raise WeightsError(f"{where} was sampled by {found}: generate with rollout_bridge.LLM")
    return versions
