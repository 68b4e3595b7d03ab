"""Padding of a batch is no token: it drives neither scores nor states (maxtext#5295)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.models import from_pretrained
from isojax.scoring import logprobs
from tests.bits import bits
from tests.qwen35_moe.tiny import write_checkpoint

WIDTH = 130
PADS = (0, 1, 63, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    write_checkpoint(folder)
    return from_pretrained(folder)


def test_b067_a_prompt_keeps_its_bits_behind_0_1_63_and_64_pads(model):
    ids = np.random.default_rng(5295).integers(0, 256, WIDTH, dtype=np.int32)
    tokens = np.full((len(PADS), WIDTH), 7, np.int32)  # Pads are a word like any other.
    for row, pad in enumerate(PADS):
        tokens[row, pad:] = ids[: WIDTH - pad]
    lengths = WIDTH - np.array(PADS, np.int32)
    scores = np.asarray(jax.jit(lambda t, n: logprobs(model, t, n, padding="left"))(tokens, lengths))
    for row, pad in enumerate(PADS):
        np.testing.assert_array_equal(bits(scores[row, pad:]), bits(scores[0, : WIDTH - pad]))
        assert not bits(scores[row, :pad]).any()


def test_b091_words_are_counted_from_the_checkpoints_tokenizer(model):
    assert (model.config.num_words, model.config.vocab_size) == (259, 320)
    tokens = jnp.asarray([[1, 2, 258, 259]], jnp.int32)
    scores = np.asarray(logprobs(model, tokens))[0]
    assert np.isfinite(scores[:3]).all()
    assert scores[3] == -np.inf  # Past the tokenizer.
