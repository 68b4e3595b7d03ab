"""What a training step runs computes floats in regions of the contract alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import isojax
from isojax import optim
from isojax.audit import Allow, Report, audit
from isojax.contract import load
from isojax.rl import gradient
from isojax.rl.losses import TokenFields, grpo_loss, supervised_loss
from isojax.sampling import Sampling
from isojax.verify.direct import as_batch
from qwen35_moe import Qwen35Moe
from tests.rollout_bridge.engines import policy

LOSSES = {
    "grpo": functools.partial(grpo_loss, clip_high=0.3, kl=0.1, entropy_bonus=0.01),
    "supervised": supervised_loss,
}
SAMPLINGS = {"all words": Sampling(0.9), "truncated": Sampling(0.9, top_k=20, top_p=0.9, min_p=0.01)}
BY_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)

ADDED_BY_OPTAX = Allow(
    "add",
    "update.py",
    "optax.apply_updates adds two float32 numbers once, which rounds to one result in any program; the update itself is"
    " what a region stored (tests/isojax/test_optim.py compares the bits with AdamW.update)",
)


@pytest.fixture(scope="module")
def model() -> Qwen35Moe:
    return policy(compute_dtype="bfloat16")


def rows_of(sampling):
    batch = as_batch([np.zeros(72, np.int32), np.zeros(40, np.int32)], sampling)
    (micro,) = batch.micro_batches
    return gradient._device_rows(batch, micro), micro.count


def audited_gradient(model, loss, sampling) -> Report:
    rows, count = rows_of(sampling)
    split = nnx.split(model, nnx.Param, ...)
    return audit(gradient._micro_gradient, *split, rows, gradient._Loss.of(loss), sampling, count, True)


def assert_clean(report: Report, *wanted: str) -> None:
    report.raise_if_findings()
    assert not report.allowed
    assert set(wanted) <= report.regions.keys()
    load("exact").refuse_unknown_regions(report.regions)


@BY_SAMPLING
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_of_a_batch_is_computed_in_regions(model, loss, sampling):
    report = audited_gradient(model, loss, sampling)
    assert_clean(report, "loss", "loss.backward", "logprob.backward", "sum_tokens", "embed.table_gradient")
    assert ("truncation_mask" in report.regions) == sampling.truncated


@BY_SAMPLING
def test_scores_are_computed_in_regions(model, sampling):
    assert_clean(audit(gradient._micro_scores, *nnx.split(model), rows_of(sampling)[0], sampling), "logprob.values")


@pytest.mark.parametrize("padding", ["left", "right"])
def test_log_probabilities_of_a_batch_and_their_gradient_are_computed_in_regions(model, padding):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    scores = functools.partial(isojax.logprobs, top_p=0.9, padding=padding, return_entropy=True)

    def pulled(params, tokens, lengths, cotangents):
        return jax.vjp(lambda params: scores(nnx.merge(graphdef, params, rest), tokens, lengths), params)[1](cotangents)

    tokens, rows = jnp.zeros((2, 70), jnp.int32), np.zeros((2, 70), np.float32)
    assert_clean(
        audit(pulled, params, tokens, jnp.array([70, 33]), (rows, rows)), "truncation_mask", "logprob.backward"
    )


def test_sums_norms_and_clipping_are_computed_in_regions(model):
    grads = nnx.state(model, nnx.Param)
    part = gradient._Sum(grads, jnp.float32(0))
    assert_clean(audit(gradient._add, part, part), "add_gradients")
    assert_clean(audit(optim.global_norm, grads), "global_norm.tiles", "global_norm")
    params = model.params()
    optimizer = optim.AdamW(lambda step: 1e-3 / (1.0 + step), weight_decay=0.1, max_grad_norm=1.0)
    report = audit(optimizer.update, params, params, optimizer.init(params))
    assert_clean(report, "global_norm", "adamw.learning_rate", "adamw.factors", "adamw")


def update(model):
    """An update as the trainer makes it, and what it is traced at."""
    optimizer = nnx.Optimizer(model, optim.adamw(1e-3, weight_decay=0.1, max_grad_norm=1.0), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    def step(state, grads):
        model, optimizer = nnx.merge(graphdef, state)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return step, state, nnx.state(model, nnx.Param)


def test_the_trainers_update_is_computed_in_regions_but_for_its_last_addition(model):
    report = audit(*update(model), allow=[ADDED_BY_OPTAX])
    report.raise_if_findings()
    load("exact").refuse_unknown_regions(report.regions)
    assert {"global_norm", "adamw.factors", "adamw"} <= report.regions.keys()
    # One addition for each shape of a parameter, and nothing else.
    assert all(finding.operands == finding.results * 2 for finding, _ in report.allowed)
    assert len(report.allowed) == len({leaf.shape for leaf in jax.tree.leaves(model.params())})


# Negative controls.


def test_the_last_addition_is_seen_where_it_is_not_allowed(model):
    assert {finding.primitive for finding in audit(*update(model)).findings} == {"add"}


def test_a_loss_outside_its_region_is_found_operation_by_operation():
    rows = jnp.zeros(64)
    found = audit(grpo_loss, rows, rows, TokenFields(rows, rows, rows)).findings
    assert {"sub", "exp", "mul", "min", "neg"} <= {finding.primitive for finding in found}


def test_a_sum_of_cotangents_that_nobody_wrote_is_found(model):
    """The residual stream without its forks: autodiff adds where it is read twice."""
    ops = model.ops.replace(fork=lambda x, consumers=2: (x,) * consumers)
    unforked = Qwen35Moe(model.config, model.params(), ops)
    report = audited_gradient(unforked, grpo_loss, Sampling())
    assert {finding.primitive for finding in report.findings} == {"add_any"}
