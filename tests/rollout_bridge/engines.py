"""A small policy, engines over it, and the trainer's forward to hold them to.

All engines have one cache layout, so that a process compiles their programs once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.layouts import CHUNK
from pallas_kernels.binding import bind
from qwen35_moe import Config, Qwen35Moe, Step, forward, logits, tie, whole_sequences
from qwen35_moe.checkpoint import seeded_params
from tests.bits import bits

PAGE = 64
"""Tokens of a page of the small model."""

WORDS = 300
"""Ids of words; the small model has 320 rows in its head."""

MAX_LEN = 512
NUM_BLOCKS = 49  # One is vLLM's null block; a request of 300 tokens holds 5 pages and 3 or more states.

SIZES = {
    **{"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "num_gpu_blocks_override": NUM_BLOCKS,
}
"""Of every engine, unless a test is about them: engines of one size share programs, over processes in the cache."""

OPS = bind("exact")


def config(**changes: Any) -> Config:
    """One period, 64 wide, 4 experts."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "rope_theta": 10_000_000.0},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "compute_dtype": "float32",
    }
    return Config(**(sizes | changes))


def policy(seed: int = 0, **changes: Any) -> Qwen35Moe:
    sizes = config(**changes)
    return Qwen35Moe(sizes, seeded_params(sizes, seed), OPS)


def start(model: Qwen35Moe, **options: Any):
    """An engine beside `model`."""
    from rollout_bridge import LLM

    return LLM(model, **(SIZES | options))


def prompts(*lengths: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random prompts; other seeds share no prefix."""
    rng = np.random.default_rng(seed)
    return [{"prompt_token_ids": rng.integers(0, WORDS, length).tolist()} for length in lengths]


def sample(**options: Any):
    from vllm import SamplingParams

    return SamplingParams(**({"max_tokens": 12, "temperature": 0.8, "detokenize": False} | options))


def sequence(output: Any, completion: Any) -> list[int]:
    return [*output.prompt_token_ids, *completion.token_ids]


def sampled(completion: Any) -> np.ndarray:
    """The log-probability that the engine returned for every sampled token."""
    values = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    return np.array(values, np.float32)


def prompt_scores(output: Any) -> np.ndarray:
    """The log-probability that the engine returned for every prompt token but the first."""
    first, *entries = output.prompt_logprobs
    assert first is None
    tokens = output.prompt_token_ids[1:]
    return np.array([entry[token].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32)


def trainer_scores(model: Qwen35Moe, sequences: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
    """The trainer's log-probability of every token but the first, from its own forward over packed sequences."""
    blocks = MAX_LEN // CHUNK
    scores = []
    for begin in range(0, len(sequences), 4):
        batch = list(sequences[begin : begin + 4])
        lengths = [len(s) for s in batch] + [0] * (4 - len(batch))
        used = [-(-length // CHUNK) * CHUNK for length in lengths]
        tokens, targets = np.zeros((2, 4 * blocks * CHUNK), np.int32)
        starts = np.cumsum([0, *used])[:4]
        for at, ids in zip(starts, batch, strict=False):
            tokens[at : at + len(ids)] = ids
            targets[at : at + len(ids) - 1] = ids[1:]
        values = _trainer(model.config)(
            model.params(), tokens, targets, np.float32(temperature), whole_sequences(lengths, 4 * blocks)
        )
        scores += [np.asarray(values)[at : at + len(ids) - 1] for at, ids in zip(starts, batch, strict=False)]
    return scores


@functools.cache
def _trainer(sizes: Config):
    @jax.jit
    def score(params, tokens, targets, temperature, chunks):
        params = tie(params, sizes, OPS)
        hidden, _, _ = forward(params, Step(tokens, None, chunks), sizes, OPS)
        temperatures = jnp.full(len(tokens), temperature)
        scores = logits(params, hidden, sizes, OPS)
        return OPS.logprob(scores, targets, temperature=temperatures, vocab=sizes.num_words)[0]

    return score


def assert_trainer_agrees(model: Qwen35Moe, outputs: Sequence[Any]) -> int:
    """Asserts that every sampled token has the trainer's bits; returns how many there were."""
    rows = [(output, completion) for output in outputs for completion in output.outputs]
    temperature = outputs[0].sampling_params.temperature or 1.0
    want = trainer_scores(model, [sequence(*row) for row in rows], temperature)
    compared = 0
    for (output, completion), scores in zip(rows, want, strict=True):
        got = sampled(completion)
        np.testing.assert_array_equal(bits(got), bits(scores[len(output.prompt_token_ids) - 1 :]))
        compared += len(got)
    assert compared
    return compared


def assert_same_samples(first: Sequence[Any], second: Sequence[Any]) -> None:
    """Asserts that two runs gave the same tokens with the same bits."""
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert list(x.token_ids) == list(y.token_ids)
            np.testing.assert_array_equal(bits(sampled(x)), bits(sampled(y)))
