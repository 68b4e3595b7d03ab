"""Scores of tokens drawn with top-k, top-p and min-p: the engine's mask, and gradients that it leaves whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from isojax.bits import assert_bit_equal
from isojax.rl import gradient
from isojax.rl.gradient import policy_gradient, score
from isojax.rl.losses import grpo_loss
from isojax.rl.packing import pack
from isojax.sampling import Sampling
from isojax.scoring import score_logits
from pallas_kernels.binding import bind
from tests.isojax.rl.outputs import random_outputs
from tests.isojax.rl.policies import bigram, score_rows

OPS, VOCAB = bind("exact"), 320
KINDS = {
    "top_k": Sampling(0.7, top_k=20),
    "top_p": Sampling(0.7, top_p=0.9),
    "min_p": Sampling(0.7, min_p=0.05),
    "all three": Sampling(0.7, top_k=50, top_p=0.95, min_p=0.01),
}
ALL = pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)

scored = jax.jit(functools.partial(score_logits, ops=OPS), static_argnames="sampling")


def random_logits(rows=70, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, VOCAB)), jnp.float32)


def kept(logits, sampling):
    """As the engine does: one array of settings for each row."""
    settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    kinds = {"top_k": np.int32}
    rows = {name: jnp.full(len(logits), value, kinds.get(name, np.float32)) for name, value in settings.items()}
    return OPS.truncation_mask(logits, **rows, vocab=VOCAB)


def definition(logits, keep, targets, temperature):
    """Log-probability, entropy and their gradients in float64, by masking logits to −∞ by hand."""
    x = np.where(keep, np.asarray(logits, np.float64) / temperature, -np.inf)
    x = x - x.max(1, keepdims=True)
    logprobs = x - np.log(np.exp(x).sum(1, keepdims=True))
    p = np.exp(logprobs)
    finite = np.where(keep, logprobs, 0.0)
    entropy = -(p * finite).sum(1)
    hit = np.arange(VOCAB) == targets[:, None]
    of_entropy = -p * (finite + entropy[:, None]) / temperature
    return logprobs[np.arange(len(p)), targets], entropy, (hit - p) / temperature, of_entropy


@ALL
def test_a_row_scores_the_bits_that_the_engine_returned_for_it_alone(sampling):
    logits = random_logits()
    targets = jnp.argmax(logits, axis=1).astype(jnp.int32)
    found, _ = scored(logits, targets, sampling=sampling)

    @jax.jit
    def engine(logits, targets):
        rows = jnp.full(len(logits), sampling.temperature, jnp.float32)
        return OPS.logprob(logits, targets, temperature=rows, keep=kept(logits, sampling), vocab=VOCAB)[0]

    for rows in (slice(0, 1), slice(3, 11), slice(0, 64), slice(0, 70)):
        assert_bit_equal(engine(logits[rows], targets[rows]), found[rows])


@ALL
def test_values_and_gradients_are_those_of_logits_masked_by_hand(sampling):
    logits = random_logits()
    keep = np.asarray(kept(logits, sampling))
    rng = np.random.default_rng(1)
    targets = np.array([rng.choice(np.flatnonzero(row)) for row in keep], np.int32)
    weights = rng.standard_normal((2, len(targets))).astype(np.float32)
    found, pull = jax.vjp(lambda logits: scored(logits, jnp.asarray(targets), sampling=sampling), logits)
    (grad,) = pull(tuple(map(jnp.asarray, weights)))
    *want, of_logprob, of_entropy = definition(logits, keep, targets, sampling.temperature)
    for got, value in zip(found, want, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad, weights[0][:, None] * of_logprob + weights[1][:, None] * of_entropy, atol=1e-5)
    assert 1 < keep.sum(1).min() <= keep.sum(1).max() < VOCAB
    assert (np.asarray(grad)[~keep] == 0).all()


@ALL
def test_a_row_that_no_loss_reads_adds_nothing_though_its_target_is_left_out(sampling):
    logits = random_logits()
    targets = jnp.argmin(logits, axis=1).astype(jnp.int32)
    (logprobs, entropy), pull = jax.vjp(lambda logits: scored(logits, targets, sampling=sampling), logits)
    assert (np.asarray(logprobs) == -np.inf).all()
    assert np.isfinite(entropy).all()
    (grad,) = pull((jnp.zeros(len(logits)), jnp.zeros(len(logits))))
    assert (np.asarray(grad) == 0).all()


def test_nothing_is_masked_where_nothing_is_left_out():
    program = str(jax.make_jaxpr(functools.partial(score_logits, ops=OPS, sampling=Sampling(0.7)))(*plain()))
    assert "truncation_mask" not in program
    whole = Sampling(0.7, top_k=VOCAB)  # Keeps every word.
    assert_bit_equal(scored(*plain(), sampling=whole), scored(*plain(), sampling=Sampling(0.7)))


def plain():
    logits = random_logits()
    return logits, jnp.argmin(logits, axis=1).astype(jnp.int32)


# The gradient of a batch.

PROMPTS, SAMPLES = 3, 4
ADVANTAGES = np.random.default_rng(1).standard_normal((PROMPTS, SAMPLES)).astype(np.float32)


@pytest.fixture
def _small_policy(monkeypatch):
    monkeypatch.setattr(gradient, "score_rows", score_rows)


@pytest.mark.usefixtures("_small_policy")
def test_b080_the_micro_batch_changes_no_bit_of_a_truncated_gradient_and_nothing_is_nan():
    """Tokens that other weights drew may be left out now: their ratio is 0, and so is what they add."""
    sampling = Sampling(2.0, top_k=200, top_p=0.999, min_p=1e-5)
    loss = functools.partial(grpo_loss, entropy_bonus=0.01)

    def batch(sequences=None):
        return pack(random_outputs(PROMPTS, SAMPLES), ADVANTAGES, 1 << 20, sequences=sequences, sampling=sampling)

    grads, scores = policy_gradient(bigram(), batch(), loss)
    mask = batch().mask
    left_out = (scores.logprobs == -np.inf)[mask]
    assert 0 < left_out.sum() < mask.sum()
    assert np.isfinite(scores.loss)
    leaves = jax.tree.leaves(nnx.to_pure_dict(grads))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any(np.any(leaf) for leaf in leaves)
    parts, again = policy_gradient(bigram(), batch(2), loss)
    assert_bit_equal(nnx.to_pure_dict(parts), nnx.to_pure_dict(grads))
    for found in (again, score(bigram(), batch())):
        assert_bit_equal(found.logprobs, scores.logprobs, where=mask)
        assert_bit_equal(found.entropy, scores.entropy, where=mask)
