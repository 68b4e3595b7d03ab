import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from pallas_kernels.logprob import Numerics, kernel, logprob, logprobs_all, reference, stock, top_logprobs
from tests.bits import assert_bit_equal, bits, differing

ROWS = (1, 7, 33, 64, 65)
TEMPERATURES = (0.6, 1.0, 1.7)

score = jax.jit(logprob, static_argnames=("vocab", "numerics"))
score_all = jax.jit(logprobs_all, static_argnames=("vocab", "numerics"))
stock_score = jax.jit(stock.logprob, static_argnames=("vocab", "numerics"))


def scores(rows=65, vocab=500, seed=0):
    return 4 * jax.random.normal(jax.random.key(seed), (rows, vocab), jnp.float32)


def words(rows=65, vocab=500):
    return jax.random.randint(jax.random.key(5), (rows,), 0, vocab, jnp.int32)


def in_float64(logits, temperature, live=True):
    x = np.where(live, np.asarray(logits, np.float64) / np.asarray(temperature, np.float64).reshape(-1, 1), -np.inf)
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def entropy_of(logprobs):
    p = np.exp(logprobs)
    return -(p * np.where(p == 0, 0, logprobs)).sum(axis=1)


@jax.jit
def score_and_gradient(logits, targets, temperature, cotangents, keep=None):
    values, pull = jax.vjp(lambda x: logprob(x, targets, temperature=temperature, keep=keep), logits)
    return *values, *pull((cotangents[0], cotangents[1]))


@pytest.mark.parametrize("vocab", [500, 512, 1100])  # Ragged splits, whole blocks, several blocks a split.
def test_a_row_has_the_same_bits_in_any_company(vocab):
    logits, targets, cotangents = scores(130, vocab), words(130, vocab), scores(2, 130, seed=8)
    temperature = jnp.linspace(0.5, 2, 130)
    want = score_and_gradient(logits, targets, temperature, cotangents)
    for rows in ROWS if vocab == 500 else (1, 65):
        for cut in (slice(rows), slice(130 - rows, 130)):
            got = score_and_gradient(logits[cut], targets[cut], temperature[cut], cotangents[:, cut])
            assert_bit_equal(got, tuple(w[cut] for w in want))


def test_a_larger_program_around_it_changes_nothing():
    logits, targets = scores(), words()
    want = score(logits, targets, temperature=0.7)

    @jax.jit
    def among_others(x):
        value, entropy = logprob(x * 2 * 0.5, targets, temperature=jnp.float32(0.7))
        return value, entropy, jnp.exp(value) + jnp.sin(entropy * 3.0)

    assert_bit_equal(among_others(logits)[:2], want)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_b077_both_are_those_of_the_scaled_logits(temperature):
    logits, targets = scores(), words()
    value, entropy = score(logits, targets, temperature=temperature)
    want = in_float64(logits, temperature)
    np.testing.assert_allclose(value, want[np.arange(65), targets], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, entropy_of(want), rtol=1e-5, atol=1e-5)


def test_b079_scoring_again_at_the_temperature_of_the_rollout_gives_the_same_bits():
    logits, targets = scores(33), words(33)
    one_by_one = [score(logits[i : i + 1], targets[i : i + 1], temperature=jnp.full(1, 0.7))[0] for i in range(33)]
    again, _ = score(logits, targets, temperature=0.7)
    assert_bit_equal(again, jnp.concatenate(one_by_one))
    other, _ = score(logits, targets, temperature=1.0)
    assert differing(again, other) > 30


@pytest.mark.parametrize("vocab", [500, 512])
def test_the_whole_row_has_the_bits_of_every_target(vocab):
    logits = scores(9, vocab)
    everything = score_all(logits, temperature=0.8)
    for target in range(0, vocab, 7):
        value, _ = score(logits, jnp.full(9, target, jnp.int32), temperature=0.8)
        assert_bit_equal(value, everything[:, target])
    np.testing.assert_allclose(np.exp(np.asarray(everything, np.float64)).sum(axis=1), 1, rtol=1e-6)


def test_b088_the_value_after_three_words_is_that_of_the_third_row():
    logits, drawn = scores(3), jnp.asarray([42], jnp.int32)
    value, _ = score(logits[2:3], drawn, temperature=1.0)
    np.testing.assert_allclose(value[0], in_float64(logits, 1.0)[2, 42], rtol=2e-6)
    assert_bit_equal(value, score_all(logits, temperature=1.0)[2:3, 42])


def test_sums_follow_the_order_that_is_promised():
    logits, numerics = scores(5, 1100), Numerics()
    block = numerics.block(1100)
    # e = exp(x − max) of the region itself: a split with one word per lane and block has sum e.
    maximum = jnp.max(logits, axis=1, keepdims=True)
    places = kernel.columns(1100, numerics)
    x = kernel.by_split(logits, numerics)
    ones = jnp.ones((5, 1))
    single, _ = jax.jit(kernel.sums(1100, 1))(x.reshape(5, -1, 1), ones, maximum, jnp.asarray(places.reshape(-1, 1)))
    single = single.reshape(5, 8, -1, block)
    chains = trees.chain(np.add, list(np.moveaxis(np.asarray(single), 2, 0)))
    splits = trees.fold(np.add, list(np.moveaxis(chains, -1, 0)))
    got, _ = jax.jit(kernel.sums(1100, block))(x, ones, maximum, jnp.asarray(places))
    assert_bit_equal(got, splits)
    _, log_total, _ = jax.jit(kernel.normalise)(jnp.broadcast_to(maximum, (5, 8)), got, jnp.zeros_like(got))
    total = trees.fold(np.add, list(splits.T))
    np.testing.assert_allclose(log_total[:, 0], np.log(total.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_may_compute_its_splits_alone(ranks):
    logits, numerics = scores(9, 500), Numerics()
    x, places = kernel.by_split(logits, numerics), jnp.asarray(kernel.columns(500, numerics))
    temperature = jnp.full((9, 1), 0.7)
    local = 8 // ranks
    cut = [slice(r * local, (r + 1) * local) for r in range(ranks)]
    maxima_of = jax.jit(kernel.maxima(490))
    sums_of = jax.jit(kernel.sums(490, numerics.block(500)))
    maxima = jnp.concatenate([maxima_of(x[:, c], temperature, places[c]) for c in cut], axis=1)
    sums = [sums_of(x[:, c], temperature, maxima, places[c]) for c in cut]
    whole = sums_of(x, temperature, maxima_of(x, temperature, places), places)
    assert_bit_equal(tuple(jnp.concatenate(s, axis=1) for s in zip(*sums, strict=True)), whole)


def test_the_number_of_splits_decides_bits():
    logits, targets = scores(), words()
    eight, one = (score(logits, targets, temperature=1.0, numerics=Numerics(num_splits=n))[1] for n in (8, 1))
    assert differing(eight, one)


def test_the_stock_log_softmax_does_not_keep_bits():
    logits, targets = scores(130, 1100), words(130, 1100)
    value, entropy = stock_score(logits, targets, temperature=0.7)
    alone = [stock_score(logits[i : i + 1], targets[i : i + 1], temperature=0.7)[1] for i in range(8)]
    assert differing(jnp.concatenate(alone), entropy[:8])
    exact = score(logits, targets, temperature=0.7)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, exact[1], rtol=1e-4, atol=1e-5)
    everything = jax.jit(stock.logprobs_all)(logits, temperature=0.7)
    np.testing.assert_allclose(everything, score_all(logits, temperature=0.7), rtol=1e-5, atol=1e-5)


# Padded words and masks


def test_b091_padded_words_do_not_exist():
    logits, targets = scores(65, 512), words(65, 500)
    want = score(logits.at[:, 500:].set(0), targets, temperature=0.7, vocab=500)
    for padding in (1e30, jnp.inf, jnp.nan):
        assert_bit_equal(score(logits.at[:, 500:].set(padding), targets, temperature=0.7, vocab=500), want)
    np.testing.assert_allclose(want[0], in_float64(logits[:, :500], 0.7)[np.arange(65), targets], atol=2e-6)
    everything = score_all(logits, temperature=0.7, vocab=500)
    assert np.isneginf(everything[:, 500:]).all()
    assert np.isfinite(everything[:, :500]).all()
    beyond, _ = score(logits, jnp.full(65, 505, jnp.int32), temperature=0.7, vocab=500)
    assert np.isneginf(beyond).all()


def test_b080_the_mask_is_part_of_the_definition():
    logits, targets = scores(), words()
    keep = jax.random.bernoulli(jax.random.key(3), 0.2, logits.shape).at[jnp.arange(65), targets].set(True)
    value, entropy = score(logits, targets, temperature=0.7, keep=keep)
    want = in_float64(logits, 0.7, np.asarray(keep))
    assert np.isfinite(value).all()
    np.testing.assert_allclose(value, want[np.arange(65), targets], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(entropy, entropy_of(want), rtol=1e-5, atol=1e-5)
    everything = score_all(logits, temperature=0.7, keep=keep)
    np.testing.assert_array_equal(np.isneginf(everything), ~np.asarray(keep))
    assert_bit_equal(everything[np.arange(65), targets], value)


def test_a_neighbour_with_a_mask_changes_nothing():
    logits, targets, cotangents = scores(), words(), scores(2, 65, seed=8)
    keep = jnp.ones(logits.shape, bool).at[0, :400].set(False)
    masked = score_and_gradient(logits, targets, jnp.full(65, 0.7), cotangents, keep)
    plain = score_and_gradient(logits, targets, jnp.full(65, 0.7), cotangents)
    assert_bit_equal(tuple(m[1:] for m in masked), tuple(p[1:] for p in plain))
    assert differing(masked[1][:1], plain[1][:1])


def test_a_mask_set_by_minus_infinity_leaves_everything_finite():
    logits, targets = scores(), words()
    banned = np.broadcast_to(np.arange(500) % 3 == 1, logits.shape)
    targets = targets - (targets % 3 == 1)
    got = score(jnp.where(banned, -jnp.inf, logits), targets, temperature=1.0)
    assert_bit_equal(got, score(logits, targets, temperature=1.0, keep=jnp.asarray(~banned)))
    assert np.isfinite(got).all()


# Nothing is hidden


@pytest.mark.parametrize("keeping", ["everything", "everything but it", "no mask"])
def test_b085_one_bad_logit_shows_in_the_whole_row_and_in_no_other(keeping):
    logits, targets = scores(9), words(9)
    keep = None if keeping == "no mask" else jnp.ones(logits.shape, bool).at[3, 77].set(keeping == "everything")
    clean = score(logits, targets, temperature=0.7)[0]
    for poison in (np.nan, -np.nan, np.inf):
        harmless = np.isinf(poison) and keeping == "everything but it"  # An infinity that cannot be drawn.
        bad = (np.arange(9) == 3) & (not harmless)
        value, entropy = score(logits.at[3, 77].set(poison), targets, temperature=0.7, keep=keep)
        everything = score_all(logits.at[3, 77].set(poison), temperature=0.7, keep=keep)
        np.testing.assert_array_equal(np.isnan(value), bad)
        np.testing.assert_array_equal(np.isnan(entropy), bad)
        np.testing.assert_array_equal(np.isnan(everything).all(axis=1), bad)
        assert_bit_equal(np.delete(value, 3), np.delete(clean, 3))


def test_a_row_without_words_is_not_a_number():
    assert np.isnan(score(scores(9), words(9), temperature=1.0, keep=jnp.zeros((9, 500), bool))).all()


def test_temperatures_and_vocabularies_without_meaning_are_refused():
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="greedy tokens are reported at temperature 1"):
            logprob(scores(), words(), temperature=temperature)
    with pytest.raises(ValueError, match="pass 1 to 500"):
        logprobs_all(scores(), temperature=1.0, vocab=501)
    assert np.isnan(score(scores(), words(), temperature=jnp.zeros(65))).all()


# Gradients


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_that_of_the_definition_in_float64(masked, temperature):
    logits, targets, cotangents = scores(33, 200), words(33, 190), scores(2, 33, seed=8)
    keep = jax.random.bernoulli(jax.random.key(3), 0.3, logits.shape).at[jnp.arange(33), targets].set(True)
    options = {"vocab": 190, "keep": keep if masked else None}

    def gradient(fn, logits, cotangents, temperature):
        _, pull = jax.vjp(lambda x: fn(x, targets, temperature=temperature, **options), logits)
        return jax.jit(pull)((cotangents[0], cotangents[1]))[0]

    got = gradient(logprob, logits, cotangents, temperature)
    native = gradient(stock.logprob, logits, cotangents, temperature)
    with jax.enable_x64(True):
        wide = (
            jnp.asarray(np.asarray(a), jnp.float64) for a in (logits, cotangents, np.full(33, np.float32(temperature)))
        )
        want = np.asarray(gradient(reference.logprob, *wide))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(native, want, rtol=1e-4, atol=2e-5)
    assert not np.asarray(got)[:, 190:].any()


def test_the_list_of_all_words_refuses_to_be_differentiated():
    with pytest.raises(TypeError, match="differentiate logprob"):
        jax.grad(lambda x: logprobs_all(x, temperature=1.0).sum())(scores(2))


# Lists for an engine


def test_b083_the_list_names_no_word_twice_beside_the_drawn_one():
    logprobs = score_all(scores(33), temperature=1.0)
    best = np.argsort(-np.asarray(logprobs), axis=1, kind="stable")
    for place in (0, 3, 100):  # Inside and outside the five likeliest.
        drawn = jnp.asarray(best[:, place], jnp.int32)
        listed, values, rank = jax.jit(top_logprobs, static_argnums=2)(logprobs, drawn, 5)
        np.testing.assert_array_equal(listed[:, 0], drawn)
        np.testing.assert_array_equal(listed[:, 1:], best[:, :5])
        np.testing.assert_array_equal(rank, place + 1)
        assert all(len(set(row)) == 5 for row in np.asarray(listed[:, 1:]))
        assert_bit_equal(values, np.take_along_axis(np.asarray(logprobs), np.asarray(listed), axis=1))
        if place < 5:
            assert_bit_equal(values[:, 0], values[:, 1 + place])


def test_equal_words_are_listed_by_ascending_word():
    logprobs = jnp.asarray([[-2.0, -1.0, -0.0, 0.0, -1.0]])
    listed, values, rank = top_logprobs(logprobs, jnp.asarray([4], jnp.int32), 4)
    np.testing.assert_array_equal(listed, [[4, 2, 3, 1, 4]])
    np.testing.assert_array_equal(rank, [4])
    assert bits(values)[0, 0] == bits(np.float32(-1.0))
