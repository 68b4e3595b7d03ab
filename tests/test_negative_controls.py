"""Each break of the product goes red and names itself: what makes the green parity tests worth something.

Here the two phases run by hand; tests/rollout_bridge breaks the engine's side (cache reset, weights, temperature).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax.models import from_pretrained
from isojax.sampling import Sampling
from isojax.verify.trace import rollout_trace, trainer_trace
from pallas_kernels.attention import attention_chunks
from pallas_kernels.linear import stock as stock_linear
from qwen35_moe import Qwen35Moe
from tests.qwen35_moe.tiny import write_checkpoint

LENGTH = 100


@functools.cache
def tokens():
    return np.random.default_rng(7).integers(0, 256, LENGTH, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    write_checkpoint(folder)
    return from_pretrained(folder, dtype="float32")  # bfloat16 would round most breaks away.


@pytest.fixture(scope="module")
def trainer(model):
    return trainer_trace(model, tokens(), Sampling())


def rounded_sigmoid_gate(o, gate):
    """`output_gate` with one rounding more: the sigmoid in bfloat16, as some stacks do it."""
    return o * jax.nn.sigmoid(gate).astype(jnp.bfloat16).astype(o.dtype)


def uncausal_attention(q, kv, kv_pages, chunks, **numerics):
    """`attention_chunks` whose rows all see their whole chunk: every row claims to be the last."""
    out = attention_chunks(q[:, ::-1], kv, kv_pages, dataclasses.replace(chunks, begin=64 - chunks.end), **numerics)
    return out[:, ::-1]


BREAKS = {
    "an op replaced by its stock twin": ("row_linear", stock_linear.row_linear),
    "a rounding moved": ("output_gate", rounded_sigmoid_gate),
    "a mask dropped": ("attention_chunks", uncausal_attention),
}


def test_unbroken_phases_agree_in_every_op(model, trainer):
    rollout, scores = rollout_trace(model, tokens(), LENGTH, 0, Sampling())
    assert rollout.first_difference(trainer[0]) is None
    np.testing.assert_array_equal(scores.view(np.uint32), trainer[1].view(np.uint32))


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_goes_red_and_names_itself(name, model, trainer):
    op, broken = BREAKS[name]
    other = Qwen35Moe(model.config, model.params(), model.ops.replace(**{op: broken}))
    rollout, scores = rollout_trace(other, tokens(), LENGTH, 0, Sampling())
    assert (scores.view(np.uint32) != trainer[1].view(np.uint32)).any()
    found = rollout.first_difference(trainer[0])
    assert found.op == {"attention_chunks": "attention.core"}.get(op, op)
    assert found.layer == (0 if op == "row_linear" else 3)


def test_another_temperature_goes_red(model, trainer):
    _, scores = rollout_trace(model, tokens(), LENGTH, 0, Sampling(temperature=0.9))
    assert (scores.view(np.uint32) != trainer[1].view(np.uint32)).mean() > 0.9
