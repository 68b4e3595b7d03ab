import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.logprob import logprob
from pallas_kernels.sample import edit_logits, reference, reported, sample, sample_key, stock, truncation_mask
from pallas_kernels.sample.keys import threefry
from pallas_kernels.sample.op import _gumbel
from pallas_kernels.sample.truncation import _mass_before
from tests.bits import assert_bit_equal, bits, differing

ROWS = (1, 7, 33, 64, 65)
draw = jax.jit(sample, static_argnames="vocab")
mask = jax.jit(truncation_mask, static_argnames="vocab")


def scores(rows=65, vocab=300, seed=0):
    return 3 * jax.random.normal(jax.random.key(seed), (rows, vocab), jnp.float32)


def keys_of(rows, request=None, sample=0, position=7, seed=1, update=2, **options):
    request = jnp.arange(rows) if request is None else jnp.full(rows, request)
    return sample_key(seed, update, request, jnp.full(rows, sample), jnp.full(rows, position), **options)


def settings(rows, **given):
    values = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    return {
        name: jnp.broadcast_to(jnp.asarray(value, jnp.int32 if name == "top_k" else jnp.float32), (rows,))
        for name, value in values.items()
    }


# Keys


def test_the_hash_is_threefry():
    # Known answers of Random123 (kat_vectors, threefry2x32 20).
    for key, counter, want in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        got = threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
        assert tuple(map(int, got)) == want


def test_a_key_is_the_hash_that_is_documented():
    def of(*words):
        return tuple(jnp.uint32(word) for word in words)

    want = threefry(threefry(of(11, 3), of(5, 2)), of(9, 0))
    got = sample_key(11, 3, *(jnp.asarray([word]) for word in (5, 2, 9)))
    assert_bit_equal(got[0], jnp.stack(want))
    user = threefry(threefry(of(2**32 - 1, 0), of(0, 2)), of(9, 1))
    own = {"user_seed": jnp.asarray([-1]), "has_user_seed": jnp.asarray([True])}
    assert_bit_equal(sample_key(11, 3, *(jnp.asarray([w]) for w in (5, 2, 9)), **own)[0], jnp.stack(user))


def test_every_word_of_a_key_matters():
    base = {"seed": 1, "update": 2, "request": 3, "sample": 4, "position": 5}
    seen = {tuple(np.asarray(keys_of(1, **base))[0])}
    for name in base:
        for value in (0, 1, 2, 3, 4, 5, 2**31 - 1):
            seen.add(tuple(np.asarray(keys_of(1, **base | {name: value}))[0]))
    assert len(seen) == 1 + 5 * 6  # Each field meets its own base value once.


def test_b010_a_seed_is_kept_beside_neighbours_without_one():
    seeds, has = jnp.full(9, 7), jnp.arange(9) == 4
    alone = keys_of(1, request=0, update=2, user_seed=seeds[:1], has_user_seed=jnp.ones(1, bool))
    among = keys_of(9, update=5, user_seed=seeds, has_user_seed=has)
    assert_bit_equal(among[4:5], alone)
    logits = jnp.zeros((9, 300))
    assert_bit_equal(draw(logits, among, jnp.ones(9))[4:5], draw(logits[:1], alone, jnp.ones(1)))
    unseeded = keys_of(9, update=5)
    assert_bit_equal(among[~has], unseeded[~has])
    assert differing(among[4:5], unseeded[4:5])


def test_b011_samples_of_a_request_differ_and_come_again():
    logits = jnp.zeros((8, 300))

    def group():
        keys = sample_key(0, 0, jnp.zeros(8, jnp.int32), jnp.arange(8), jnp.full(8, 12))
        return np.asarray(draw(logits, keys, jnp.ones(8)))

    assert len(set(group())) > 4
    np.testing.assert_array_equal(group(), group())


# Draws


def test_a_draw_does_not_depend_on_its_neighbours():
    logits, keys, temperature = scores(), keys_of(65), jnp.linspace(0.0, 2.0, 65)
    keep = jax.random.bernoulli(jax.random.key(4), 0.7, logits.shape)
    want = draw(logits, keys, temperature, keep)
    for rows in ROWS:
        for cut in (slice(rows), slice(65 - rows, 65)):
            assert_bit_equal(draw(logits[cut], keys[cut], temperature[cut], keep[cut]), want[cut])
    assert_bit_equal(draw(logits, keys, temperature, jnp.ones(logits.shape, bool)), draw(logits, keys, temperature))


def test_the_draw_is_the_largest_of_logits_and_noise():
    logits, keys, temperature = scores(), keys_of(65), jnp.linspace(0.3, 2.0, 65)
    keep = jax.random.bernoulli(jax.random.key(4), 0.7, logits.shape)
    words = jnp.broadcast_to(jnp.arange(300, dtype=jnp.uint32), logits.shape)
    noise = _gumbel(threefry((keys[:, :1], keys[:, 1:]), (words, jnp.zeros_like(words)))[0])
    want = reference.sample(logits, noise, temperature, keep)
    np.testing.assert_array_equal(draw(logits, keys, temperature, keep), want)


def test_noise_is_finite_at_both_ends_and_gumbel_between():
    ends = _gumbel(jnp.asarray([0, 1, 2**32 - 1], jnp.uint32))
    np.testing.assert_allclose(ends[:2], np.log(2.0**33 / np.array([1.0, 3.0])), rtol=1e-6)
    assert np.isfinite(ends).all()
    spread = _gumbel(jnp.arange(0, 2**32, 2**14, dtype=jnp.uint32))
    quantile = (np.arange(0, 2**32, 2**14, dtype=np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(spread, -np.log(-np.log1p(-quantile)), rtol=2e-5, atol=2e-6)


def test_frequencies_are_the_probabilities():
    logits = jnp.asarray([0.0, 1.0, 2.0, -1.0, 0.5])
    count = 40_000
    drawn = draw(jnp.broadcast_to(logits, (count, 5)), keys_of(count), jnp.full(count, 0.7))
    p = np.asarray(jax.nn.softmax(logits / 0.7), np.float64)
    seen = np.bincount(np.asarray(drawn), minlength=5)
    assert (np.abs(seen - count * p) < 5 * np.sqrt(count * p * (1 - p))).all()


def test_b091_no_padded_word_is_drawn_in_a_hundred_thousand_hot_draws():
    count, vocab = 100_000, 77
    logits = jnp.broadcast_to(jnp.zeros(128).at[vocab:].set(9.0), (count, 128))
    drawn = np.asarray(draw(logits, keys_of(count), jnp.full(count, 5.0), vocab=vocab))
    assert drawn.max() == vocab - 1
    assert len(set(drawn)) == vocab
    assert np.asarray(draw(logits[:100], keys_of(100), jnp.full(100, 5.0))).max() >= vocab  # Unmasked it would be.


def test_greedy_rows_take_the_lowest_of_the_largest_and_report_temperature_one():
    logits = scores(33).at[:, 40].set(50.0).at[:, 200].set(50.0)
    temperature = jnp.where(jnp.arange(33) % 2 == 0, 0.0, 1e-6)
    np.testing.assert_array_equal(draw(logits, keys_of(33), temperature), np.full(33, 40))
    assert_bit_equal(reported(jnp.asarray([0.0, 9e-6, 1e-5, 0.7])), jnp.asarray([1.0, 1.0, 1e-5, 0.7]))


def test_a_padded_word_is_not_even_drawn_from_a_bad_row():
    logits = scores(9).at[3, 77].set(jnp.nan).at[4, :].set(-jnp.inf).at[5, 290:].set(jnp.nan)
    drawn = np.asarray(draw(logits, keys_of(9), jnp.ones(9), vocab=280))
    assert (drawn >= 0).all()
    assert (drawn < 280).all()


def test_vocabularies_beyond_the_logits_are_refused():
    with pytest.raises(ValueError, match="pass 1 to 300"):
        sample(scores(), keys_of(65), jnp.ones(65), vocab=301)
    with pytest.raises(ValueError, match="pass 1 to 300"):
        truncation_mask(scores(), **settings(65), vocab=0)


# Truncation

CASES = [
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"top_p": 0.999, "temperature": 3.0},
]


@pytest.mark.parametrize("given", CASES)
def test_the_mask_is_that_of_the_definition_in_float64(given):
    logits = scores(33)
    got = mask(logits, **settings(33, **given))
    with jax.enable_x64(True):
        wide = {
            k: jnp.asarray(np.asarray(v, np.int32 if k == "top_k" else np.float64))
            for k, v in settings(33, **given).items()
        }
        want = reference.truncation_mask(jnp.asarray(np.asarray(logits, np.float64)), **wide)
    np.testing.assert_array_equal(got, want)
    assert (np.asarray(got).sum(axis=1) >= 1).all()


def test_a_mask_does_not_depend_on_its_neighbours():
    logits = scores()
    each = {"top_k": jnp.arange(65) % 40, "top_p": jnp.linspace(0.1, 1.0, 65), "min_p": jnp.linspace(0, 0.1, 65)}
    want = mask(logits, **settings(65, **each))
    for rows in ROWS:
        for cut in (slice(rows), slice(65 - rows, 65)):
            some = {name: value[cut] for name, value in settings(65, **each).items()}
            assert_bit_equal(mask(logits[cut], **some), want[cut])


def test_off_is_off():
    assert np.asarray(mask(scores(), **settings(65))).all()
    assert np.asarray(mask(scores().at[:, ::2].set(-jnp.inf), **settings(65, top_k=-1, top_p=1.5))).all()


def test_of_equal_words_the_lower_one_stays():
    logits = jnp.asarray([[1.0, 2.0, 2.0, -0.0, 0.0, 2.0, 0.0]])
    np.testing.assert_array_equal(mask(logits, **settings(1, top_k=2))[0], [0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(mask(logits, **settings(1, top_k=5))[0], [1, 1, 1, 1, 0, 1, 0])
    np.testing.assert_array_equal(mask(logits, **settings(1, top_p=0.4))[0], [0, 1, 1, 0, 0, 0, 0])


def test_padded_words_are_not_kept_and_weigh_nothing():
    logits = scores(9)
    want = mask(logits[:, :280], **settings(9, top_p=0.9))
    got = mask(logits.at[:, 280:].set(40.0), **settings(9, top_p=0.9), vocab=280)
    np.testing.assert_array_equal(got[:, :280], want)
    assert not np.asarray(got[:, 280:]).any()


def test_a_bad_logit_survives_truncation():
    for poison in (np.nan, -np.nan):
        logits = scores(9).at[3, 77].set(poison)
        keep = mask(logits, **settings(9, top_k=5, top_p=0.9))
        assert keep[3, 77]
        drawn = draw(logits, keys_of(9), jnp.full(9, 0.8), keep)
        value, _ = jax.jit(logprob)(logits, drawn, temperature=0.8, keep=keep)
        np.testing.assert_array_equal(np.isnan(value), np.arange(9) == 3)


def test_b080_the_drawn_word_always_has_a_probability():
    logits = scores(640, 300)
    keep = mask(logits, **settings(640, top_k=20, top_p=0.9))
    drawn = draw(logits, keys_of(640), jnp.full(640, 0.8), keep)
    value, _ = jax.jit(logprob)(logits, drawn, temperature=0.8, keep=keep)
    assert np.isfinite(value).all()
    assert differing(value, jax.jit(logprob)(logits, drawn, temperature=0.8)[0]) > 600


def test_mass_is_added_in_the_promised_order():
    e = np.asarray(jnp.exp(scores(7, 384)))
    inside = e.reshape(7, 3, 128)
    for shift in (1, 2, 4, 8, 16, 32, 64):
        inside = inside + np.pad(inside, ((0, 0), (0, 0), (shift, 0)))[:, :, :128]
    total, before = np.zeros((7, 1), np.float32), []
    for block in range(3):
        before.append(total + np.pad(inside[:, block], ((0, 0), (1, 0)))[:, :128])
        total = total + inside[:, block, -1:]
    got = jax.jit(_mass_before)(e)
    assert_bit_equal(got, (np.concatenate(before, axis=1), total))
    assert differing(got[0][:, 1:], np.cumsum(e, axis=1)[:, :-1])


def test_the_stock_twins_mean_the_same():
    logits = scores(640, 300)
    given = settings(640, top_k=40, top_p=0.9)
    keep = np.asarray(mask(logits, **given, vocab=280))
    native = np.asarray(jax.jit(stock.truncation_mask, static_argnames="vocab")(logits, **given, vocab=280))
    assert (keep != native).sum() <= 2  # A word on the edge may fall either way.
    drawn = np.asarray(stock.sample(logits, keys_of(640), jnp.full(640, 0.8), jnp.asarray(native), vocab=280))
    assert np.take_along_axis(native, drawn[:, None], axis=1).all()
    greedy = stock.sample(logits, keys_of(640), jnp.zeros(640), vocab=280)
    np.testing.assert_array_equal(greedy, np.argmax(logits[:, :280], axis=1))
    assert (bits(drawn) != bits(draw(logits, keys_of(640), jnp.full(640, 0.8), jnp.asarray(native), vocab=280))).any()


# Edits


@pytest.mark.parametrize("rows", ROWS)
def test_edits_change_the_words_they_name_and_no_other_bit(rows):
    rng = np.random.default_rng(rows)
    logits = np.array(scores(rows)).copy()
    words = np.stack([rng.choice(300, 16, replace=False) for _ in range(rows)]).astype(np.int32)
    words[:, 10:] = 300  # Padding.
    bias = rng.standard_normal((rows, 16)).astype(np.float32)
    bias[:, 3] = -np.inf
    only = np.arange(rows) % 3 == 0
    found = jax.jit(lambda *args: edit_logits(*args) * 2)(*map(jnp.asarray, (logits, words, bias, only))) / 2
    want = np.where(only[:, None], np.float32(-np.inf), logits)
    for row in range(rows):
        want[row, words[row, :10]] = logits[row, words[row, :10]] + bias[row, :10]
    assert_bit_equal(found, want)
