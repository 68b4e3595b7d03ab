"""What an engine says about a mismatch that no op explains: its weights, its cache, how a request was drawn."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from vllm import SamplingParams

from isojax.samples import Sample
from isojax.sampling import Sampling
from qwen35_moe import rollout_params
from rollout_bridge import weights

if TYPE_CHECKING:
    from rollout_bridge.llm import LLM


def diagnose(llm: "LLM", model: Any, sample: Sample, trainer: Float[np.ndarray, " sampled"], sampling: Sampling) -> str:
    """Names what of an engine made its log-probabilities differ, where every op computes the same in both programs.

    Weights are fingerprinted as they are now, and the sequence is scored again without the prefix cache, which this
    empties.

    Args:
        llm: The engine that drew the sample.
        model: The trainer's policy, of the weights that both should have.
        sample: The sequence that differs.
        trainer: The trainer's log-probabilities of its sampled tokens.
        sampling: The distribution that it says it was drawn from.
    """
    held = llm.fingerprints()
    wanted = weights.digests(rollout_params(model.params(), model.config, model.ops))
    altered = sorted(name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name))
    if altered:
        return f"the engine's weights are not the trainer's: {weights.listed(altered)}"
    if sampling.truncated:
        return "the engine has the trainer's weights; it does not score truncated distributions again"
    who = f"request {sample.prompt}, sample {sample.sample}"
    again = _scored(llm, sample, sampling)
    if not np.array_equal(again.view(np.uint32), trainer[: len(again)].view(np.uint32)):
        return f"the engine has the trainer's weights and scores {who} again with other bits: an op differs in it"
    if sample.cached:
        return (
            f"the engine has the trainer's weights, and its bits once it scores {who} without the {sample.cached}"
            " tokens that it took from its prefix cache: those are of other weights, the cache was not reset after an"
            " update"
        )
    return (
        f"the engine has the trainer's weights, and its bits when it scores {who} again at temperature"
        f" {sampling.temperature}: the request was drawn at another temperature than it says, or decoded in another way"
    )


def _scored(llm: "LLM", sample: Sample, sampling: Sampling) -> np.ndarray:
    """The engine's log-probabilities of the sampled tokens, from its prefill; the last may have no room."""
    ids = [*sample.prompt_tokens.tolist(), *sample.tokens.tolist()][: llm.model_config.max_model_len - 1]
    asked = SamplingParams(max_tokens=1, temperature=sampling.temperature, prompt_logprobs=0, detokenize=False)
    llm.reset_prefix_cache()
    [output] = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    scores = output.prompt_logprobs
    assert scores is not None
    first = len(sample.prompt_tokens)
    return np.array([scores[at][token].logprob for at, token in enumerate(ids[first:], first)], np.float32)
