"""Which sampling options are served, refused by name otherwise; what the sampling program gets of them."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped

from isojax.errors import SamplingError
from isojax.pytrees import pytree
from rollout_bridge.requests import Request

if TYPE_CHECKING:
    from vllm import SamplingParams

# What this package does with an option, or vLLM does outside the worker. Every other option that is not at its
# default is refused, those of a later vLLM too.
_SERVED = {
    "n", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs", "flat_logprobs",
    "logit_bias", "allowed_token_ids", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "stream_interval", "skip_clone", "repetition_detection", "watermarking",
    "skip_reading_prefix_cache", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "_watermarking_skipped",
}  # fmt: skip
_NAMES = re.compile(r"^(?:(?P<sample>\d+)_)?(?P<request>.*?)(?:-[0-9a-f]{8})?$", re.DOTALL)

MAX_EDITS = 1024
"""Tokens of one request whose logits may be edited."""

MOST_LIKELY = 32
"""Likeliest tokens scored when any are asked for: one program serves every number up to it."""


def refuse_unsupported(params: Any) -> None:
    """Checks the parameters of one request before anything of it runs.

    Raises:
        SamplingError: If an option is not served; the message names every one.
    """
    from vllm import SamplingParams

    if not isinstance(params, SamplingParams):
        raise SamplingError(f"{type(params).__name__} is not served: only token generation is")
    plain = SamplingParams()
    refused = [
        f"{name}={getattr(params, name)!r} is not served"
        for name in SamplingParams.__struct_fields__
        if name not in _SERVED and (getattr(params, name) or None) != (getattr(plain, name) or None)
    ]
    if params.watermarking:
        refused.append("watermarking=True is not served")
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and not 0 <= asked <= MOST_LIKELY:
            refused.append(f"{name}={asked} is not served: ask for 0 to {MOST_LIKELY} likeliest tokens")
    if params.flat_logprobs and (params.logprobs or params.prompt_logprobs):
        refused.append("flat_logprobs lists a sampled token twice when it is among the likeliest: leave it off")
    if params.prompt_logprobs is not None:
        if params.skip_reading_prefix_cache is False:
            refused.append("prompt_logprobs of cached tokens are not kept: leave skip_reading_prefix_cache out")
        if edits := _restrictions(params):
            refused.append(f"prompt_logprobs are scored without {', '.join(edits)}: ask for them in another request")
    if len(_edited(params)) > MAX_EDITS:
        refused.append(f"logit_bias and allowed_token_ids name more than {MAX_EDITS} tokens")
    if refused:
        raise SamplingError("; ".join(refused))


def _restrictions(params: "SamplingParams") -> list[str]:
    found = [name for name in ("logit_bias", "allowed_token_ids") if getattr(params, name)]
    found += ["top_k"] * (params.top_k > 0) + ["top_p"] * (params.top_p < 1) + ["min_p"] * (params.min_p > 0)
    return found


def _edited(params: "SamplingParams") -> set[int]:
    return {*(params.logit_bias or ()), *(params.allowed_token_ids or ()), *params.all_stop_token_ids}


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """What `pallas_kernels.sample.sample_key` makes a sequence's keys of, each in 32 bits.

    Attributes:
        request: The number of a request that `LLM` numbered; of other ids a hash.
        sample: Which of the request's samples it is.
        seed: The request's own seed, if it has one.
    """

    request: int
    sample: int
    seed: int | None

    @classmethod
    def of(cls, name: str, seed: int | None) -> "Stream":
        """The stream of the sequence that vLLM calls `name`.

        vLLM names sample i of several `i_request`, adds `-` and 8 random digits, and seeds it `seed + i`.
        """
        parts = _NAMES.match(name)
        assert parts is not None  # The pattern matches every string.
        sample, request = int(parts["sample"] or 0), parts["request"]
        number = int(request) if request.isdigit() and int(request) < 1 << 32 else _hash(request)
        return cls(number, sample, None if seed is None else _word(seed - sample))


def _word(value: int) -> int:
    return value if 0 <= value < 1 << 32 else _hash(str(value))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Controls:
    """How one token is drawn for each row, padded; on the host.

    Attributes:
        slot: Slot whose hidden row is sampled; `num_slots` for padding.
        position: Position of the token that is drawn.
        samples: Whether the row's token is kept: not for a piece that ends inside the known tokens.
        temperature: 0 for greedy rows.
        top_k, top_p, min_p: 0, 1 and 0 when off.
        update: Version of the weights.
        request, sample, seed: As `Stream`, int32 of the same bits; the seed counts where `seeded` says so.
    """

    slot: Shaped[Any, " rows"]
    position: Shaped[Any, " rows"]
    samples: Shaped[Any, " rows"]
    temperature: Shaped[Any, " rows"]
    top_k: Shaped[Any, " rows"]
    top_p: Shaped[Any, " rows"]
    min_p: Shaped[Any, " rows"]
    update: Shaped[Any, ""]
    request: Shaped[Any, " rows"]
    sample: Shaped[Any, " rows"]
    seed: Shaped[Any, " rows"]
    seeded: Shaped[Any, " rows"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True)
class Edits:
    """Logits changed before sampling: `add` is added to those of `tokens`; `only` rows keep no other token.

    Padding has a token past the vocabulary.
    """

    tokens: Shaped[Any, "rows edits"]
    add: Shaped[Any, "rows edits"]
    only: Shaped[Any, " rows"]


def controls(
    requests: Sequence[Request], counts: Sequence[int], size: int, *, version: int, num_slots: int
) -> Controls:
    """Controls of `requests`, of each of which `counts` tokens run in this step, padded to `size` rows."""
    rows = [r.sampling for r in requests]
    ends = [r.computed + count for r, count in zip(requests, counts, strict=True)]
    streams = [Stream.of(r.name, r.sampling.seed) for r in requests]

    def padded(values, fill, dtype):
        return np.array([*values, *[fill] * (size - len(rows))], dtype)

    return Controls(
        slot=padded([r.slot for r in requests], num_slots, np.int32),
        position=padded(ends, 0, np.int32),
        samples=padded([end >= r.prefill_len for r, end in zip(requests, ends, strict=True)], False, bool),
        temperature=padded([p.temperature for p in rows], 0.0, np.float32),
        top_k=padded([max(p.top_k, 0) for p in rows], 0, np.int32),
        top_p=padded([p.top_p for p in rows], 1.0, np.float32),
        min_p=padded([p.min_p for p in rows], 0.0, np.float32),
        update=np.int32(version),
        request=padded([s.request for s in streams], 0, np.uint32).view(np.int32),
        sample=padded([s.sample for s in streams], 0, np.uint32).view(np.int32),
        seed=padded([s.seed or 0 for s in streams], 0, np.uint32).view(np.int32),
        seeded=padded([s.seed is not None for s in streams], False, bool),
    )


def no_controls(size: int, num_slots: int) -> Controls:
    """Controls of `size` rows of which none is there."""
    return controls([], [], size, version=0, num_slots=num_slots)


def edits(requests: Sequence[Request], counts: Sequence[int], size: int, vocab: int) -> Edits | None:
    """Edits of the step's logits, or None when no row asks for any."""
    found = [_edits_of(r, r.computed + count - r.prompt_len) for r, count in zip(requests, counts, strict=True)]
    if not any(found):
        return None
    most = max(len(f) for f in found if f)
    width = next(w for w in (16, 64, 256, MAX_EDITS) if w >= most)
    tokens, add = np.full((size, width), vocab, np.int32), np.zeros((size, width), np.float32)
    for row, of_row in enumerate(found):
        for i, (token, value) in enumerate((of_row or {}).items()):
            tokens[row, i], add[row, i] = token, value
    only = [bool(r.sampling.allowed_token_ids) for r in requests]
    return Edits(tokens, add, np.array([*only, *[False] * (size - len(requests))], bool))


def _edits_of(request: Request, generated: int) -> dict[int, float] | None:
    params = request.sampling
    allowed = params.allowed_token_ids
    found = dict.fromkeys(allowed or (), 0.0)
    found |= {token: bias for token, bias in (params.logit_bias or {}).items() if not allowed or token in found}
    if generated < params.min_tokens:
        found |= dict.fromkeys(params.all_stop_token_ids, -np.inf)
    return found or None
