"""The programs that an engine compiles compute floats in regions of the contract alone."""

from pathlib import Path

import jax
import numpy as np
import pytest

from isojax.audit import Report, audit
from isojax.contract import load
from pallas_kernels.binding import Ops
from qwen35_moe import Placement, page_tokens, rollout_params
from rollout_bridge import pages, programs, weights
from rollout_bridge.cache import Layout
from rollout_bridge.programs import Programs
from rollout_bridge.sampling import MOST_LIKELY, Edits
from tests.rollout_bridge.engines import OPS, config, policy

CONFIG = config(compute_dtype="bfloat16")
PARAMS = policy(compute_dtype="bfloat16").params()
EDITS = Edits(np.zeros((8, 16), np.int32), np.zeros((8, 16), np.float32), np.zeros(8, bool))


def engine(ops: Ops = OPS, kind: type[Programs] = Programs) -> Programs:
    page = page_tokens(CONFIG)
    layout = Layout(9, page, page, 0, (1, 2, 3), Placement.by_period(CONFIG))
    return kind(CONFIG, ops, layout, num_slots=4, max_len=128)


def served():
    """Rollout weights and an empty state, as shapes."""
    params = jax.eval_shape(lambda params: rollout_params(params, CONFIG, OPS), PARAMS)
    return params, jax.eval_shape(engine().fresh_state)


def forward(rows: int, blocks: int, **made) -> Report:
    made = engine(**made)
    return audit(made._forward, *served(), made.idle(rows, blocks)[0])


def sample(edits=None, filtered=False, most_likely=0, **made) -> Report:
    made = engine(**made)
    return audit(made._sample, *served(), made.idle(8, 0)[1], edits, filtered, most_likely)


def score(most_likely: int) -> Report:
    params, state = served()
    hidden = jax.ShapeDtypeStruct((72, CONFIG.hidden_size), CONFIG.compute_dtype)
    where = np.zeros(3, np.int32)
    return audit(engine()._score, params, state.tokens, hidden, where, np.float32(1), most_likely)


def assert_clean(report: Report) -> None:
    report.raise_if_findings()
    assert not report.allowed
    load("exact").refuse_unknown_regions(report.regions)


@pytest.mark.parametrize(("rows", "blocks"), [(8, 0), (8, 4)], ids=["decode", "mixed"])
def test_forwards_compute_in_regions(rows, blocks):
    report = forward(rows, blocks)
    assert_clean(report)
    assert {"gdn.decode", "attention", "moe_combine"} <= report.regions.keys()
    assert ("gdn.chunks" in report.regions) == bool(blocks)


@pytest.mark.parametrize("edits", [None, EDITS], ids=["", "edits"])
@pytest.mark.parametrize("filtered", [False, True], ids=["all words", "filtered"])
@pytest.mark.parametrize("most_likely", [0, MOST_LIKELY])
def test_samplers_compute_in_regions(edits, filtered, most_likely):
    report = sample(edits, filtered, most_likely)
    assert_clean(report)
    wanted = {"linear.column", "sample", "logprob.maxima", "logprob.sums", "logprob.normalise", "logprob.values"}
    wanted |= {"truncation_mask"} if filtered else set()
    wanted |= {"logit_bias"} if edits else set()
    assert report.regions.keys() == wanted


@pytest.mark.parametrize("most_likely", [0, MOST_LIKELY])
def test_scores_of_prompts_compute_in_regions(most_likely):
    report = score(most_likely)
    assert_clean(report)
    assert "logprob.values" in report.regions


def test_new_weights_are_cast_in_regions():
    flat = weights.flatten(PARAMS)
    report = audit(weights._rounding(CONFIG, OPS), flat)
    assert_clean(report)
    assert set(report.regions) == {"cast"}
    for value in flat.values():
        assert not audit(weights._lanes, value).findings


def test_tokens_and_pages_only_move():
    _, state = served()
    to = np.zeros(16, np.int32)
    for fn, *args in (
        (pages._zeroed, state.cache.pools, to),
        (pages._copied, state.cache.pools, to, to),
        (programs._write_row, state.tokens, 1, np.zeros(129, np.int32)),
    ):
        report = audit(fn, *args)
        assert not report.findings
        assert not report.regions


# Negative controls.


def test_a_bare_sum_of_the_residual_stream_is_found():
    def residual_add(x, y):
        return x + y

    findings = forward(8, 0, ops=OPS.replace(residual_add=residual_add)).findings
    assert {(f.primitive, f.function) for f in findings} == {("add", "residual_add")}


class _Biased(Programs):
    """Adds to logits as programs did before `edit_logits` was a region."""

    def _logits(self, params, hidden):
        logits = super()._logits(params, hidden)
        return logits.at[:, :8].set(logits[:, :8] + logits[:, 8:16])


def test_a_sum_of_logits_outside_a_region_is_found_by_its_line():
    (finding,) = sample(kind=_Biased).findings
    assert (finding.primitive, finding.function) == ("add", "_Biased._logits")
    assert "logits[:, :8] +" in Path(__file__).read_text().splitlines()[finding.line - 1]
