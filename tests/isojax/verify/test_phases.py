import itertools

import numpy as np
import pytest

from isojax.bits import assert_bit_equal
from isojax.rl.parity import Mismatch
from isojax.samples import Sample
from isojax.sampling import Sampling
from isojax.verify.direct import draw, forward_rows, gradient_rows
from isojax.verify.phases import Plan
from isojax.verify.trace import explain, rollout_trace, trainer_trace
from pallas_kernels.binding import bind
from qwen35_moe import Qwen35Moe
from tests.rollout_bridge import engines

PLANS = (Plan("whole"), Plan("pieces of 63", piece=63), Plan("decode after 60", prompts=60))
LENGTHS = (63, 66, 150)
PROMPT = 70

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return engines.policy(compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def tokens(model):
    return draw(model, [90])[0]


@pytest.fixture(scope="module")
def trainer(model, tokens):
    return trainer_trace(model, tokens, Sampling())


def test_every_phase_has_the_trainers_bits(model):
    rows = list(forward_rows(model, LENGTHS, PLANS))
    assert {row.name: row.different for row in rows} == {row.name: 0 for row in rows}
    assert all(row.compared for row in rows)


def test_native_rows_differ(model):
    native = Qwen35Moe(model.config, model.params(), bind("native"))
    assert any(row.different for row in forward_rows(native, LENGTHS, PLANS[2:]))


def test_the_gradient_of_every_weight_is_the_same_for_micro_batches_of_one_and_of_eight(model):
    forward, gradient, again = itertools.islice(gradient_rows(model), 3)
    assert gradient.name == "gradient, micro-batches of 1"
    assert gradient.compared > 100_000
    assert (forward.different, gradient.different, again.different) == (0, 0, 0), str(gradient)


def test_two_traces_of_one_phase_agree_in_every_op(model, tokens, trainer):
    again, scores = trainer_trace(model, tokens, Sampling())
    assert again.first_difference(trainer[0]) is None
    assert_bit_equal(scores, trainer[1])
    assert {"embed", "rms_norm", "gdn.core", "attention.core", "moe_combine"} <= {op for _, op, _ in again.values}


def test_the_op_that_breaks_decode_is_named_with_its_layer_and_token(model, tokens, trainer):
    def broken(*args, **kwargs):
        out, slots = model.ops.gdn_decode(*args, **kwargs)
        return out * np.asarray(1.01, out.dtype), slots

    wrong = Qwen35Moe(model.config, model.params(), model.ops.replace(gdn_decode=broken))
    trace, scores = rollout_trace(wrong, tokens, PROMPT, 0, Sampling())
    found = trace.first_difference(trainer[0])
    assert (found.op, found.layer, found.token) == ("gdn.core", 0, PROMPT)
    assert_bit_equal(scores[: PROMPT - 1], trainer[1][: PROMPT - 1])


def test_a_mismatch_that_replays_clean_points_at_the_engine(model, tokens, trainer):
    scores = trainer[1][PROMPT - 1 :]
    rollout = scores.copy()
    rollout.view(np.uint32)[3] ^= 1
    sample = Sample(0, 0, tokens[:PROMPT], tokens[PROMPT:], rollout, np.full(len(rollout), 12, np.int32), cached=64)
    found = explain(model, Mismatch((sample,), (scores,), Sampling()))
    assert found.difference is None
    assert found.reproduced == (False, True)
    assert "prefix hit 64 tokens; weights v12 on both sides; the rollout cannot be reproduced" in str(found)
