"""A vocabulary on the ranks of a mesh axis: embedding and log-probabilities with the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isojax
from isojax import ops
from isojax.contract import load
from isojax.errors import ShardingError
from isojax.layouts import Segments
from pallas_kernels.logprob import Numerics
from tests.bits import assert_bit_equal, differing
from tests.pallas_kernels.meshes import ALL, AXIS, COLUMNS, RANKS, ROWS, assert_as_on_one_device, on_ranks


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def words(rows, vocab):
    return jax.random.randint(jax.random.key(5), (rows,), 0, vocab, jnp.int32)


@pytest.mark.parametrize("vocab", [1104, 2048])  # Splits of 138 words: two blocks with padding; whole blocks.
def test_logprobs_and_entropies_of_a_sharded_vocabulary_have_the_bits_of_one_device(vocab):
    rows, real = 70, vocab - 150  # The last ranks hold padded words alone.
    logits, targets = 4 * random(0, rows, vocab), words(rows, real).at[:2].set(jnp.array([-1, real]))
    settings = {"temperature": jnp.linspace(0.5, 2, rows), "vocab": real}
    assert_as_on_one_device(
        lambda logits: ops.logprob(logits, targets, **settings),
        lambda logits: ops.logprob(logits, targets, axis_name=AXIS, **settings),
        (logits,),
        (COLUMNS,),
        (random(1, rows), random(2, rows)),
        (ALL, ALL),
        ranks=RANKS if vocab == 1104 else (8,),
    )


def test_a_mask_over_a_sharded_vocabulary_and_a_list_of_all_words():
    vocab, rows = 520, 66
    logits, targets, keep = 4 * random(0, rows, vocab), words(rows, vocab), random(1, rows, vocab) > -1

    def both(logits, keep, axis_name=None):
        settings = {"temperature": 0.7, "keep": keep, "axis_name": axis_name}
        return ops.logprob(logits, targets, **settings), ops.logprobs_all(logits, **settings)

    want = jax.jit(both)(logits, keep)
    assert np.isneginf(want[0][0]).any()
    run = on_ranks(lambda x, k: both(x, k, AXIS), 4, (COLUMNS, COLUMNS), ((ALL, ALL), COLUMNS))
    assert_bit_equal(run(logits, keep), want)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_token_drawn_from_a_sharded_vocabulary_is_that_of_one_device(ranks):
    vocab, rows, real = 1200, 70, 1000  # The last of eight ranks holds padded words alone, none is whole blocks of 128.
    logits = jnp.round(4 * random(0, rows, vocab)).at[5, 600].set(jnp.nan)  # Many are equal: the lowest is drawn.
    temperature = jnp.where(jnp.arange(rows) % 3 == 0, 0.0, 0.8)
    keys = ops.sample_key(1, 2, *(jnp.arange(rows),) * 3)
    limits = {"top_k": jnp.arange(rows) % 50, "top_p": jnp.linspace(0.5, 1, rows), "min_p": jnp.full(rows, 0.001)}

    def draw(logits, axis_name=None):
        at = {"vocab": real, "axis_name": axis_name}
        keep = ops.truncation_mask(logits, temperature=jnp.full(rows, 0.8), **limits, **at)
        tokens = ops.sample(logits, keys, temperature, **at), ops.sample(logits, keys, temperature, keep, **at)
        return tokens, keep

    want = jax.jit(draw)(logits)
    assert (want[0][0] != want[0][1]).any()
    assert len(np.unique(np.asarray(want[0][0]) // (vocab // ranks))) > 1
    run = on_ranks(lambda x: draw(x, AXIS), ranks, COLUMNS, ((ALL, ALL), COLUMNS))
    assert_bit_equal(run(logits), want)


def test_noise_of_a_ranks_own_numbering_draws_other_tokens():
    """Negative control: noise is a hash of the word in the whole vocabulary, not of its place on a rank."""
    logits, keys = random(0, 70, 512), ops.sample_key(1, 2, *(jnp.arange(70),) * 3)

    def own_numbering(x):
        best = ops.sample(x, keys, jnp.full(70, 0.8))
        scores = jax.lax.all_gather(jnp.take_along_axis(x, best[:, None], axis=1), AXIS, axis=1, tiled=True)
        words = jax.lax.all_gather((best + 128 * jax.lax.axis_index(AXIS))[:, None], AXIS, axis=1, tiled=True)
        return jnp.take_along_axis(words, jnp.argmax(scores, axis=1)[:, None], axis=1)[:, 0]

    want = jax.jit(lambda x: ops.sample(x, keys, jnp.full(70, 0.8)))(logits)
    assert differing(on_ranks(own_numbering, 4, COLUMNS, ALL)(logits), want)


def test_a_nan_on_any_rank_shows_on_all():
    logits = random(0, 64, 512).at[3, 400].set(jnp.nan)
    run = on_ranks(lambda x: ops.logprob(x, words(64, 100), temperature=1.0, axis_name=AXIS), 4, COLUMNS, (ALL, ALL))
    logprobs, entropies = run(logits)
    assert np.flatnonzero(np.isnan(logprobs)).tolist() == [3]
    assert np.flatnonzero(np.isnan(entropies)).tolist() == [3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", ["replicated", "scattered"])
def test_rows_of_a_sharded_table_have_the_bits_of_one_device(rows, dtype):
    scatter = 0 if rows == "scattered" else None
    tokens = words(192, 40).at[:3].set(jnp.array([0, 39, 5]))
    settings = {"dtype": dtype, "segments": Segments(jnp.array([0, 0, 1]), 2)}
    assert_as_on_one_device(
        lambda table: ops.embed(tokens, table, **settings),
        lambda table: ops.embed(tokens, table, axis_name=AXIS, scatter_axis=scatter, **settings),
        (random(0, 40, 48),),
        (ROWS,),
        random(1, 192, 48, dtype=dtype),
        ALL if scatter is None else ROWS,
        ranks=RANKS if dtype == "float32" else (8,),
    )


def test_tokens_beyond_a_sharded_table_are_nan_and_any_number_of_rows_goes():
    tokens, table = jnp.array([3, -1, 40, 39, 0]), random(0, 40, 8)
    want = jax.jit(lambda t: ops.embed(tokens, t, dtype="float32"))(table)
    got = on_ranks(lambda t: ops.embed(tokens, t, dtype="float32", axis_name=AXIS), 4, ROWS, ALL)(table)
    assert np.isnan(got).all(axis=1).tolist() == [False, True, True, False, False]
    assert_bit_equal(got[np.array([0, 3, 4])], want[np.array([0, 3, 4])])


def language_model(params, tokens, axis_name=None):
    """A small one with a tied table, whose rows are sharded between layers."""
    scatter = None if axis_name is None else 0
    table, head = ops.fork(params["table"])
    x = ops.embed(tokens, table, dtype="bfloat16", axis_name=axis_name, scatter_axis=scatter)
    x, skip = ops.fork(x)
    h = ops.rms_norm(x, params["norm"], axis_name=axis_name)
    up, gate = ops.column_linear(h, (params["up"], params["gate"]), axis_name=axis_name, gather_axis=scatter)
    y = ops.row_linear(ops.swiglu(gate, up), params["down"], axis_name=axis_name, scatter_axis=scatter)
    h = ops.rms_norm(ops.residual_add(skip, y), params["out_norm"], axis_name=axis_name)
    (logits,) = ops.column_linear(h, (head,), out_dtypes=["float32"], axis_name=axis_name, gather_axis=scatter)
    logprobs, entropies = ops.logprob(logits, jnp.roll(tokens, -1), temperature=1.0, axis_name=axis_name)
    return ops.sum_tokens(logprobs), (logprobs, entropies)


def test_a_language_model_on_ranks_has_the_loss_and_gradients_of_one_device_and_passes_the_audit():
    tokens, width, hidden = words(512, 240), 32, 96
    shapes = {"table": (240, width), "up": (hidden, width), "gate": (hidden, width), "down": (width, hidden)}
    params = {name: random(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    params |= {"norm": random(8, width), "out_norm": random(9, width)}
    specs = {"table": ROWS, "up": ROWS, "gate": ROWS, "down": COLUMNS, "norm": ALL, "out_norm": ALL}
    want = jax.jit(jax.value_and_grad(language_model, has_aux=True))(params, tokens)
    step = jax.value_and_grad(lambda params, tokens: language_model(params, tokens, AXIS), has_aux=True)
    step = on_ranks(step, 8, (specs, ALL), (ALL, specs))
    assert_bit_equal(step(params, tokens), want)
    report = isojax.audit(step, params, tokens)
    report.raise_if_findings()
    named = {region for op in load("exact").document.ops.values() for region in op.regions}
    assert set(report.regions) <= named


def test_vocabularies_that_ranks_do_not_hold_in_splits_are_refused():
    def run(x):
        return ops.logprob(x, words(8, 100), temperature=1.0, numerics=Numerics(num_splits=4), axis_name=AXIS)[0]

    with pytest.raises(ShardingError, match="logprob: num_splits=4 does not divide over tensor=8"):
        on_ranks(run, 8, COLUMNS, ALL)(random(0, 8, 512))
    embed = on_ranks(
        lambda t: ops.embed(words(6, 8), t, dtype="float32", axis_name=AXIS, scatter_axis=0), 4, ROWS, ROWS
    )
    with pytest.raises(ShardingError, match=r"embed .* 6 rows, .* tensor=4: pad them to 8"):
        embed(random(0, 8, 16))
    with pytest.raises(ValueError, match="embed got scatter_axis=0 with axis_name=None"):
        ops.embed(words(8, 8), random(0, 8, 16), dtype="float32", scatter_axis=0)
