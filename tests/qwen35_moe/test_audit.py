"""Every program of the model computes floats in regions of the contract alone; what does not is named by its line."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from isojax.audit import audit
from isojax.contract import load
from isojax.rl import gradient
from pallas_kernels.binding import bind
from pallas_kernels.linear import stock as linear_stock
from pallas_kernels.rms_norm import stock as rms_norm_stock
from qwen35_moe import forward
from tests.bits import assert_bit_equal
from tests.qwen35_moe.dtypes import DTYPES, golden, signature
from tests.qwen35_moe.programs import PROGRAMS, Programs
from tests.qwen35_moe.tiny import config


def audited(kind, program, ops=None, dtype="bfloat16"):
    fn, args = getattr(Programs(kind, dtype, ops or bind("exact")), program)()
    return audit(fn, *args)


@pytest.mark.parametrize("kind", ["experts", "dense"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_float_is_computed_in_a_region_that_the_contract_knows(program, kind):
    report = audited(kind, program)
    report.raise_if_findings()
    assert not report.allowed
    assert len(report.regions) > 14
    load("exact").refuse_unknown_regions(report.regions)


def test_sums_over_micro_batches_are_regions():
    part = gradient._Sum({"w": jnp.zeros((3, 5))}, jnp.zeros(()))
    report = audit(gradient._add, part, part)
    report.raise_if_findings()
    assert set(report.regions) == {"add_gradients"}


# Negative controls: what must be found, where it stands.


def test_a_stock_twin_in_place_of_an_op_is_found_where_it_stands():
    report = audited("dense", "score", bind("exact").replace(rms_norm=rms_norm_stock.rms_norm))
    assert {Path(f.file).parts[-2:] for f in report.findings} == {("rms_norm", "reference.py")}
    assert "rms_norm" not in report.regions
    assert {"mul", "rsqrt", "reduce_sum"} <= {f.primitive for f in report.findings}


def test_b032_a_product_outside_the_regions_is_found():
    """jax#34080: the rows of a `dot_general` change with the number of rows."""
    report = audited("experts", "score", bind("exact").replace(column_linear=linear_stock.column_linear))
    assert any(f.primitive == "dot_general" and Path(f.file).name == "stock.py" for f in report.findings)


def test_a_bare_sum_in_model_code_is_found_by_its_line():
    programs = Programs("dense", "bfloat16", bind("exact"))

    def sloppy(params, step):
        hidden, _, _ = forward(params, step, programs.config, programs.ops, max_positions=128)
        return hidden + hidden

    (finding,) = audit(sloppy, programs.params, programs.step).findings
    assert (finding.primitive, finding.function) == ("add", "sloppy")
    assert "hidden + hidden" in Path(finding.file).read_text().splitlines()[finding.line - 1]
    assert "ops.residual_add" in str(finding)


def test_a_sum_in_a_users_loss_is_found_by_its_line():
    fn, args = Programs("dense", "bfloat16", bind("exact")).score()

    def loss(params, *rest):
        logprob, _ = fn(params, *rest)
        return jnp.sum(logprob)

    (finding,) = audit(loss, *args).findings
    assert (finding.problem, finding.function, Path(finding.file).name) == ("jnp.sum", "loss", "test_audit.py")
    assert "ops.tree_sum" in finding.use


# The dtypes of the scored path (slime#830).


@pytest.mark.parametrize("dtype", DTYPES)
def test_b023_no_dtype_on_the_scored_path_has_changed(dtype):
    """If the change is meant: `python -m tests.qwen35_moe.dtypes`, and look at the difference."""
    assert signature(dtype, bind("exact")) == golden(dtype).read_text()


def test_an_autocast_around_the_score_changes_the_dtypes():
    ops = bind("exact")

    def autocast(logits, *args, **settings):
        return ops.logprob(ops.cast(ops.cast(logits, jnp.bfloat16), jnp.float32), *args, **settings)

    assert signature("bfloat16", ops.replace(logprob=autocast)) != golden("bfloat16").read_text()


@pytest.mark.parametrize("program", ["score", "decode"])
def test_b025_every_layer_turns_by_float32_tables_whatever_the_rest_is_computed_in(program):
    ops, seen = bind("exact"), []

    def asked(x, scale, cos, sin, **settings):
        seen.append((x.dtype.name, cos.dtype.name, sin.dtype.name))
        return ops.norm_rope(x, scale, cos, sin, **settings)

    fn, args = getattr(Programs("experts", "bfloat16", ops.replace(norm_rope=asked)), program)()
    jax.eval_shape(fn, *args)
    assert len(seen) >= 2  # Queries and keys of the attention layer.
    assert set(seen) == {("bfloat16", "float32", "float32")}


# Concatenated state before a norm (jax#40588).


def test_b034_a_window_and_rows_put_together_before_a_norm_have_the_bits_of_a_version_with_barriers():
    cfg, ops = config("bfloat16"), bind("exact")
    rng = np.random.default_rng(40588)

    def random(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def decode(hold, x, window, weight, chunk_rows, z, scale):
        y, window = map(hold, ops.causal_conv_decode(hold(x), hold(window), weight))
        history = hold(jnp.concatenate([hold(jnp.concatenate([window, y[:, None]], axis=1)), window], axis=1))
        heads = hold(jnp.concatenate([hold(history.reshape(-1, y.shape[1])), chunk_rows]).reshape(-1, 8, 32))
        return window, ops.l2_norm(heads, scale=0.5), ops.gated_norm(heads, z, scale, eps=cfg.rms_norm_eps)

    args = (random(3, 256), random(3, 3, 256), random(256, 4, dtype=jnp.float32), random(64, 256))
    args += (random(85, 8, 32), random(32, dtype=jnp.float32))
    plain = jax.jit(lambda *args: decode(lambda x: x, *args))(*args)
    held = jax.jit(lambda *args: decode(lax.optimization_barrier, *args))(*args)
    assert_bit_equal(plain, held)
