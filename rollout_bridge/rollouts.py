"""The engine as `isojax.rl.Trainer` uses it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollout_bridge.llm import LLM

if TYPE_CHECKING:
    from vllm import RequestOutput


class Rollouts:
    """An `LLM` beside a trainer, with a run's settings.

    Args:
        model: The policy; the engine shares its arrays.
        engine: What `LLM` is made with, e.g. `max_model_len`.
        sampling: What `SamplingParams` are made with, e.g. `n`, `temperature`, `max_tokens`.
        chat: Whether a prompt is the content of a user's turn, or raw text.
    """

    def __init__(self, model: Any, engine: dict[str, Any], sampling: dict[str, Any], *, chat: bool = False):
        self.llm = LLM(model, **engine)
        self._sampling, self._chat = sampling, chat

    @property
    def weights_version(self) -> int:
        """Version of the weights that the next rollout is sampled from."""
        return self.llm.weights_version

    def rollout(self, prompts: Sequence[str], seeds: Sequence[int]) -> "Sequence[RequestOutput]":
        """Completions of every prompt; a prompt's depend on its seed and the weights alone."""
        from vllm import SamplingParams

        params = [SamplingParams(**self._sampling, seed=seed) for seed in seeds]
        if self._chat:
            turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
            return self.llm.chat(turns, params, use_tqdm=False)  # pyright: ignore[reportArgumentType]
        return self.llm.generate(list(prompts), params, use_tqdm=False)

    def update_weights(self, model: Any) -> None:
        """Exchanges all weights, or raises and keeps the old ones."""
        self.llm.update_weights(model)

    def close(self) -> None:
        """Ends the engine; its pages are free again."""
        self.llm.llm_engine.engine_core.shutdown()
