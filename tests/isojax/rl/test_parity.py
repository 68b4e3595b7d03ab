import dataclasses

import numpy as np
import pytest

from isojax.bits import assert_bit_equal
from isojax.errors import MismatchError, WeightsError
from isojax.rl.packing import pack
from isojax.rl.parity import Mismatch, check_parity, compare
from tests.isojax.rl.outputs import completion, random_outputs, request


@pytest.fixture
def batch():
    return pack(random_outputs(4, 2), np.ones((4, 2)), 4096)


def flip(logprobs, row):
    """The same log-probabilities, one in its last bit."""
    changed = logprobs.copy()
    changed.view(np.uint32)[row] ^= 1
    return changed


def test_equal_bits_pass_and_are_counted(batch):
    parity = check_parity(batch, batch.rollout_logprobs.copy())
    assert str(parity) == f"{batch.num_tokens} compared, 0 different"
    assert (parity.ratio_max_abs_minus_1, parity.kl) == (0.0, 0.0)
    assert parity.by_position[0].sum() == batch.num_tokens


def test_one_bit_of_one_token_stops_the_update_and_is_named(batch, tmp_path):
    row = np.flatnonzero(batch.mask)[-1]
    with pytest.raises(MismatchError) as stopped:
        check_parity(batch, flip(batch.rollout_logprobs, row), directory=tmp_path, step=12)
    sample = batch.samples[-1]
    message = str(stopped.value)
    assert f"1 of {batch.num_tokens} log-probabilities differ; no update was applied." in message
    assert f"request 3, sample 1, position {sample.length - 1} (token {sample.tokens[-1]}): rollout" in message
    assert f"reproduce: isojax diff {tmp_path / 'mismatch_0012.npz'}" in message


def test_the_mismatch_file_holds_the_sequence(batch, tmp_path):
    row = np.flatnonzero(batch.mask)[5]
    with pytest.raises(MismatchError):
        check_parity(batch, flip(batch.rollout_logprobs, row), directory=tmp_path)
    loaded = Mismatch.load(tmp_path / "mismatch_0000.npz")
    assert len(loaded.samples) == 1
    for field in dataclasses.fields(loaded.samples[0]):
        got, want = (getattr(s, field.name) for s in (loaded.samples[0], batch.samples[0]))
        assert_bit_equal(got, want)
    assert loaded.sampling == batch.sampling
    assert loaded.first[1] == 5


def test_padding_and_prompts_are_not_compared(batch):
    noise = np.where(batch.mask, batch.rollout_logprobs, np.float32(np.nan))
    assert check_parity(batch, noise).different == 0


def test_a_trainer_that_is_not_a_number_differs(batch, tmp_path):
    logprobs = batch.rollout_logprobs.copy()
    logprobs[np.flatnonzero(batch.mask)[0]] = np.nan
    with pytest.raises(MismatchError, match="nan"):
        check_parity(batch, logprobs, directory=tmp_path)


def test_minus_zero_is_not_zero(batch, tmp_path):
    zero = pack([request([1], [completion([5], [0.0])])], np.ones((1, 1)), 64)
    with pytest.raises(MismatchError, match="80000000"):
        check_parity(zero, np.where(zero.mask, np.float32(-0.0), 0), directory=tmp_path)


def test_tokens_of_other_weights_are_counted_and_not_compared():
    spans = [("v1", 0, 1), ("v2", 1, 3)]
    batch = pack([request([1, 2], [completion([5, 6, 7], [-1, -2, -3], spans)])], np.ones((1, 1)), 64)
    stale = flip(batch.rollout_logprobs, np.flatnonzero(batch.mask)[0])
    assert str(check_parity(batch, stale)) == "2 compared, 0 different, 1 off-policy"
    assert str(compare(batch, stale, weights_version=1)) == "1 compared, 1 different, 2 off-policy"


def test_a_batch_of_other_weights_alone_is_refused(batch):
    with pytest.raises(WeightsError, match="the trainer has v11, the whole batch was sampled with v0"):
        check_parity(batch, batch.rollout_logprobs, weights_version=11)


def test_what_explains_the_mismatch_is_part_of_the_message(batch, tmp_path):
    changed = flip(batch.rollout_logprobs, np.flatnonzero(batch.mask)[0])
    with pytest.raises(MismatchError, match="first differing op: gdn"):
        check_parity(batch, changed, directory=tmp_path, explain=lambda mismatch: "first differing op: gdn")
