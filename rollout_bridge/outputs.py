"""Arrays for a training step from what vLLM returned; nothing is repaired, shifted or filled in."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isojax.errors import SamplingError
from isojax.samples import Request, read_samples
from isojax.sampling import Sampling


def tokens_and_logprobs(outputs: Sequence[Request]) -> dict[str, Any]:
    """What was sampled, row by row, in (prompt, sample) order.

    Tokens are the ids that the engine saw and drew; they are never decoded and encoded again.

    Args:
        outputs: The `vllm.RequestOutput`s of `LLM.generate` or `LLM.chat`.

    Returns:
        With B samples of at most T tokens, prompt included:

        - `tokens` int32 [B, T], prompt then completion, 0 after the end; `lengths` and `prompt_lengths` int32 [B]
        - `mask` bool [B, T], true for sampled tokens
        - `rollout_logprobs` float32 [B, T] of `tokens[b, t]`, the engine's bits; 0 outside `mask`
        - `weights_version` int32 [B, T], of the weights that sampled the token; -1 outside `mask`
        - `temperature`, `top_p`, `min_p` float32 [B], `top_k` int32 [B]: the distribution that tokens were drawn from
        - `prompt` int32 [B], index of the prompt; `truncated` bool [B], whether `max_tokens` ended the sample

    Raises:
        SamplingError: If a sampled token has no finite log-probability, a sample is empty or unfinished, or tokens were
            drawn in a way that scoring does not recompute.
        WeightsError: If a sample does not say which weights sampled it.
    """
    samples = list(read_samples(outputs))
    if not samples:
        raise SamplingError("tokens_and_logprobs got no outputs: there is nothing to learn from")
    drawn = [_sampling(outputs[s.prompt]) for s in samples]
    shape = len(samples), max(s.length for s in samples)
    batch: dict[str, Any] = {
        "tokens": np.zeros(shape, np.int32),
        "lengths": np.array([s.length for s in samples], np.int32),
        "prompt_lengths": np.array([len(s.prompt_tokens) for s in samples], np.int32),
        "mask": np.zeros(shape, bool),
        "rollout_logprobs": np.zeros(shape, np.float32),
        "weights_version": np.full(shape, -1, np.int32),
        "temperature": np.array([d.temperature for d in drawn], np.float32),
        "top_k": np.array([d.top_k for d in drawn], np.int32),
        "top_p": np.array([d.top_p for d in drawn], np.float32),
        "min_p": np.array([d.min_p for d in drawn], np.float32),
        "prompt": np.array([s.prompt for s in samples], np.int32),
        "truncated": np.array([outputs[s.prompt].outputs[s.sample].finish_reason == "length" for s in samples]),
    }
    for row, sample in enumerate(samples):
        sampled = slice(len(sample.prompt_tokens), sample.length)
        batch["tokens"][row, : sample.length] = np.concatenate([sample.prompt_tokens, sample.tokens])
        batch["mask"][row, sampled] = True
        batch["rollout_logprobs"][row, sampled] = sample.logprobs
        batch["weights_version"][row, sampled] = sample.versions
    return batch


def _sampling(output: Any) -> Sampling:
    params = getattr(output, "sampling_params", None)
    if params is None:
        raise SamplingError(f"request {output.request_id} does not say how it was sampled: use rollout_bridge.LLM")
    return Sampling.of(params)
