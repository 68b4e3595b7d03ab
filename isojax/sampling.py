"""The distribution that tokens are drawn from."""

import dataclasses
from typing import Any

from isojax.errors import SamplingError


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """What tokens were drawn from: part of the definition of their log-probabilities.

    Attributes:
        temperature: Logits are divided by it.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this probability mass; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the likeliest; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise SamplingError(
                f"temperature={self.temperature} draws the likeliest token with certainty: there is no"
                " distribution to learn from, use a temperature above 0"
            )

    @property
    def truncated(self) -> bool:
        """Whether tokens can be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @classmethod
    def of(cls, params: Any) -> "Sampling":
        """The distribution that `vllm.SamplingParams` describe.

        Raises:
            SamplingError: If they edit logits in a way that scoring does not recompute, or are greedy.
        """
        edits = [name for name in ("logit_bias", "allowed_token_ids", "min_tokens") if getattr(params, name, None)]
        if edits:
            raise SamplingError(f"tokens were drawn with {', '.join(edits)}, which scoring does not recompute")
        return cls(params.temperature, max(0, params.top_k), params.top_p, params.min_p)
