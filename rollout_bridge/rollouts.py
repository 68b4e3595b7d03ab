"""The engine as a training loop needs it: prompts and seeds in, checked outputs out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from vllm import RequestOutput, SamplingParams

from isojax.samples import Sample
from isojax.sampling import Sampling
from rollout_bridge.diagnosis import diagnose
from rollout_bridge.llm import LLM


class Rollouts:
    """vLLM's engine beside a policy, in one process.

    Args:
        model: The policy; the engine shares its arrays.
        engine: Options of `LLM`.
        sampling: Options of `vllm.SamplingParams`.
        chat: Whether prompts are chat messages or plain text and token ids.

    Raises:
        ContractError: If policy and engine do not compute the same function.
    """

    def __init__(self, model: Any, engine: Mapping[str, Any], sampling: Mapping[str, Any], *, chat: bool = False):
        self.llm = LLM(model, **engine)
        self._sampling, self._chat = dict(sampling), chat

    @property
    def weights_version(self) -> int:
        """Number of weight updates so far."""
        return self.llm.weights_version

    def rollout(self, prompts: Sequence[Any], seeds: Sequence[int]) -> list[RequestOutput]:
        """Completions of every prompt, in order; a prompt's depend on its seed and the weights alone."""
        sampling = [SamplingParams(seed=seed, **self._sampling) for seed in seeds]
        if not self._chat:
            return self.llm.generate(list(prompts), sampling, use_tqdm=False)
        chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return self.llm.chat(chats, sampling, use_tqdm=False)

    def update_weights(self, model: Any) -> None:
        """Exchanges all weights, or raises and keeps the old ones."""
        self.llm.update_weights(model)

    def diagnose(self, model: Any, sample: Sample, trainer: Float[np.ndarray, " sampled"], sampling: Sampling) -> str:
        """What of the engine made a sample's log-probabilities differ (`rollout_bridge.diagnosis`)."""
        return diagnose(self.llm, model, sample, trainer, sampling)

    def close(self) -> None:
        """Frees the engine's memory."""
        self.llm.close()
