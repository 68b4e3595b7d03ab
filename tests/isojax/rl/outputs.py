"""Rollouts as an engine returns them, without an engine."""

from types import SimpleNamespace

import numpy as np


def completion(tokens, logprobs, versions=None, index=0, finish_reason="stop"):
    spans = [("0", 0, len(tokens))] if versions is None else versions
    return SimpleNamespace(
        index=index,
        finish_reason=finish_reason,
        text="",
        token_ids=list(tokens),
        logprobs=[{int(t): SimpleNamespace(logprob=float(v))} for t, v in zip(tokens, logprobs, strict=True)],
        weight_versions=[SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans] or None,
    )


def request(prompt, completions, name="0", cached=0):
    return SimpleNamespace(
        request_id=name, prompt_token_ids=list(prompt), outputs=list(completions), num_cached_tokens=cached
    )


def sampling_params(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **edits):
    return SimpleNamespace(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **edits)


def random_outputs(prompts, samples, *, vocab=320, seed=0, longest=90, logprob=None):
    """Random requests whose lengths straddle chunk borders."""
    rng = np.random.default_rng(seed)
    outputs = []
    for p in range(prompts):
        prompt = rng.integers(1, vocab, rng.integers(1, longest))
        completions = []
        for s in range(samples):
            tokens = rng.integers(1, vocab, rng.integers(1, longest // 2))
            values = -rng.random(len(tokens), np.float32) if logprob is None else np.full(len(tokens), logprob)
            completions.append(completion(tokens, values, index=s))
        outputs.append(request(prompt, completions, name=str(p)))
    return outputs
