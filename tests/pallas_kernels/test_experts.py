import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import trees
from isojax.layouts import Segments
from pallas_kernels import experts
from pallas_kernels.experts import Schedule, dispatch_plan, gather_rows, grouped_linear, reference, stock
from pallas_kernels.experts.plan import TILE, max_tiles
from tests.bits import assert_bit_equal, differing

EXPERTS, RANKS = 5, 3
DTYPES = ["bfloat16", "float32"]


def random(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def random_experts(rows, ranks=RANKS, experts=EXPERTS, seed=0):
    """Distinct experts in each row; every seventh row has none."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts)[:ranks] for _ in range(rows)]).astype(np.int32)
    chosen[3::7] = experts
    return jnp.asarray(chosen)


def sequences(*blocks):
    """Sequence i has `blocks[i]` blocks of 64 rows."""
    return Segments(jnp.repeat(jnp.arange(len(blocks)), jnp.array(blocks)).astype(jnp.int32), len(blocks))


make_plan = jax.jit(dispatch_plan, static_argnums=1)


def by_choice(pairs, plan):
    """Pairs as [rows, ranks, width], without the rows that have no expert."""
    return pairs[plan.position[(plan.position < pairs.shape[0]).all(-1)]]


# The plan


@pytest.mark.parametrize(
    ("experts", "segments"),
    [
        (random_experts(1), None),
        (random_experts(256), sequences(1, 0, 2, 1)),
        (random_experts(70), None),
        (jnp.full((40, 1), 2, jnp.int32), None),
        (jnp.full((40, 2), EXPERTS, jnp.int32), None),
    ],
    ids=["one row", "sequences, one empty", "ragged rows", "all to one expert", "no expert at all"],
)
def test_a_plan_lists_every_choice_once_by_expert_sequence_row_and_rank(experts, segments):
    plan = make_plan(experts, EXPERTS, segments)
    experts = np.asarray(experts)
    rows, ranks = experts.shape
    count = segments.count if segments else 1
    sequence = np.repeat(segments.sequence, 64) if segments else np.zeros(rows, int)

    groups = {(e, s): [] for e in range(EXPERTS) for s in range(count)}
    for row, rank in itertools.product(range(rows), range(ranks)):
        if experts[row, rank] < EXPERTS:
            groups[int(experts[row, rank]), int(sequence[row])].append((row, rank))
    want, tile_expert, tile_pairs, first_tile = [], [], [], [0]
    for (expert, _), pairs in groups.items():
        tiles = -(-len(pairs) // TILE)
        want += pairs + [(rows, 0)] * (TILE * tiles - len(pairs))
        tile_expert += [expert] * tiles
        tile_pairs += [min(TILE, len(pairs) - TILE * t) for t in range(tiles)]
        first_tile.append(len(tile_expert))
    dead = max_tiles(rows * ranks, len(groups)) - len(tile_expert)
    assert dead >= 0
    want += [(rows, 0)] * (TILE * dead)
    np.testing.assert_array_equal(np.stack([plan.row, plan.rank], -1), want)
    np.testing.assert_array_equal(plan.tile_expert, tile_expert + [EXPERTS] * dead)
    np.testing.assert_array_equal(plan.tile_pairs, tile_pairs + [0] * dead)
    np.testing.assert_array_equal(plan.first_tile, first_tile)
    place = {pair: i for i, pair in enumerate(want) if pair[0] < rows}
    position = [[place.get((row, rank), len(want)) for rank in range(ranks)] for row in range(rows)]
    np.testing.assert_array_equal(plan.position, position)


def test_the_number_of_tiles_is_the_least_bound():
    for choices, groups in itertools.product(range(1, 52), range(1, 4)):
        sizes = (s for s in itertools.product(range(choices + 1), repeat=groups) if sum(s) == choices)
        assert max(sum(-(-n // TILE) for n in s) for s in sizes) == max_tiles(choices, groups)


def test_segments_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="segments of 1 blocks for 65 rows"):
        dispatch_plan(random_experts(65), EXPERTS, Segments.one(64))


# Rows to pairs


@pytest.mark.parametrize("dtype", DTYPES)
def test_b076_pads_and_the_tail_are_zero(dtype):
    plan = make_plan(random_experts(70), EXPERTS)
    x = random(0, 70, 32, dtype=dtype)
    pairs = np.asarray(jax.jit(gather_rows)(x, plan))
    real = np.asarray(plan.row) < 70
    assert_bit_equal(pairs[real], np.asarray(x)[plan.row[real]])
    assert not real[-TILE:].any()
    assert_bit_equal(pairs[~real], np.zeros_like(pairs[~real]))
    product = np.asarray(jax.jit(grouped_linear)(pairs, random(1, EXPERTS, 48, 32), plan))
    assert_bit_equal(product[~real], np.zeros_like(product[~real]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_adds_its_cotangents_in_rank_order(dtype):
    plan = make_plan(random_experts(70), EXPERTS)
    cotangent = random(1, plan.row.shape[0], 32, dtype=dtype)
    got = jax.jit(lambda x, g: jax.vjp(lambda x: gather_rows(x, plan), x)[1](g)[0])(
        random(0, 70, 32, dtype=dtype), cotangent
    )
    terms = np.append(np.asarray(cotangent, np.float32), np.zeros((1, 32), np.float32), 0)[plan.position]
    assert_bit_equal(got, ((terms[:, 0] + terms[:, 1]) + terms[:, 2]).astype(dtype))
    if dtype == "float32":
        assert differing(got, (terms[:, 0] + (terms[:, 1] + terms[:, 2])).astype(dtype)) > 100


# Products


@pytest.mark.parametrize(
    "of", [grouped_linear, reference.grouped_linear, stock.grouped_linear], ids=["region", "reference", "stock"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 32), (160, 200)])
def test_products_and_gradients_agree_with_float64(outputs, inputs, dtype, of):
    plan = make_plan(random_experts(100), EXPERTS)
    x, weight = gather_rows(random(0, 100, inputs, dtype=dtype), plan), random(1, EXPERTS, outputs, inputs)
    cotangent = gather_rows(random(2, 100, outputs, dtype=dtype), plan)
    got, pull = jax.vjp(lambda x, w: of(x, w, plan), x, weight)
    x_grad, weight_grad = pull(cotangent)
    assert (got.dtype, x_grad.dtype, weight_grad.dtype) == (dtype, dtype, jnp.float32)

    x, weight, cotangent = (np.asarray(a, np.float64) for a in (x, weight.astype(dtype), cotangent))
    expert = np.repeat(np.minimum(plan.tile_expert, EXPERTS - 1), TILE)
    error = {"rtol": 2**-8, "atol": 1e-5} if dtype == "bfloat16" else {"atol": 1e-4}
    np.testing.assert_allclose(np.asarray(got, np.float64), np.einsum("poi,pi->po", weight[expert], x), **error)
    np.testing.assert_allclose(
        np.asarray(x_grad, np.float64), np.einsum("poi,po->pi", weight[expert], cotangent), **error
    )
    want = np.stack([cotangent[expert == e].T @ x[expert == e] for e in range(EXPERTS)])
    # Autodiff of the twins rounds the weight's gradient to the compute dtype; the region keeps float32.
    exact = of is grouped_linear or dtype == "float32"
    np.testing.assert_allclose(weight_grad, want, **({"atol": 1e-4} if exact else {"rtol": 2**-6, "atol": 0.2}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_keeps_its_bits_in_any_company_place_and_schedule(dtype):
    experts, x, weight = random_experts(130), random(0, 130, 160, dtype=dtype), random(1, EXPERTS, 80, 160)

    @jax.jit
    def run(x, experts):
        plan = dispatch_plan(experts, EXPERTS)
        return by_rows(grouped_linear(gather_rows(x, plan), weight, plan), plan)

    def by_rows(y, plan):
        return y.at[plan.position].get(mode="fill", fill_value=0)

    want = run(x, experts)
    for rows in (1, 7, 33):
        assert_bit_equal(run(x[:rows], experts[:rows]), want[:rows])
    assert_bit_equal(run(x[::-1], experts[::-1])[::-1], want)
    others = jnp.where(jnp.arange(130)[:, None] == 60, x, random(2, 130, 160, dtype=dtype))
    assert_bit_equal(run(others, experts.at[:60].set(experts[60]))[60], want[60])
    plan = make_plan(experts, EXPERTS, sequences(1, 1, 1))  # Other tiles: groups of one sequence each.
    pairs = gather_rows(x, plan)
    for schedule in (Schedule(), Schedule(1), Schedule(7, 64), Schedule(10, 128)):
        got = jax.jit(lambda x, schedule=schedule: grouped_linear(x, weight, plan, schedule=schedule))(pairs)
        assert_bit_equal(by_rows(got, plan), want)


def test_the_stock_product_does_not_keep_them():
    experts, x, weight = jnp.zeros((130, 1), jnp.int32), random(0, 130, 160), random(1, EXPERTS, 80, 160)

    @jax.jit
    def run(x, experts):
        plan = dispatch_plan(experts, EXPERTS)
        return stock.grouped_linear(stock.gather_rows(x, plan), weight, plan)[plan.position[:, 0]]

    assert differing(run(x, experts)[:1], run(x[:1], experts[:1])) > 0


def test_float32_weights_are_rounded_to_the_dtype_of_the_pairs():
    plan = make_plan(random_experts(70), EXPERTS)
    x, weight = gather_rows(random(0, 70, 32, dtype="bfloat16"), plan), random(1, EXPERTS, 48, 32)
    assert_bit_equal(
        jax.jit(grouped_linear)(x, weight, plan), jax.jit(grouped_linear)(x, weight.astype(jnp.bfloat16), plan)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_b074_all_tokens_to_one_expert_leave_nothing_unwritten(dtype):
    plan = make_plan(jnp.full((70, 1), 2, jnp.int32), EXPERTS)
    pads = (plan.row == 70)[:, None]
    x = jnp.where(pads, jnp.nan, gather_rows(random(0, 70, 32, dtype=dtype), plan))
    cotangent = jnp.where(pads, jnp.nan, gather_rows(random(2, 70, 48, dtype=dtype), plan))
    weight = jnp.full((EXPERTS, 48, 32), jnp.nan).at[2].set(random(1, 48, 32))
    out, (x_grad, weight_grad) = jax.jit(
        lambda x, w, g: (grouped_linear(x, w, plan), jax.vjp(lambda x, w: grouped_linear(x, w, plan), x, w)[1](g))
    )(x, weight, cotangent)
    for pairs in (out, x_grad):
        assert np.isfinite(np.asarray(pairs, np.float32)).all()
        assert not np.asarray(jnp.where(pads, pairs, 0)).any()
    assert np.isfinite(weight_grad).all()
    assert np.asarray(weight_grad[2]).all()
    absent = weight_grad[jnp.array([0, 1, 3, 4])]
    assert_bit_equal(absent, jnp.zeros_like(absent))


# Weight gradients


@jax.jit
def weight_gradient(x, cotangent, experts, segments):
    plan = dispatch_plan(experts, EXPERTS, segments)
    weight = jnp.zeros((EXPERTS, cotangent.shape[1], x.shape[1]))
    return jax.vjp(lambda w: grouped_linear(gather_rows(x, plan), w, plan), weight)[1](gather_rows(cotangent, plan))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradients_are_the_tree_over_sequences_computed_alone(dtype):
    rows = [slice(0, 64), slice(64, 192), slice(192, 256), slice(256, 320)]
    x, cotangent, experts = random(0, 320, 48, dtype=dtype), random(1, 320, 32, dtype=dtype), random_experts(320)
    alone = [weight_gradient(x[r], cotangent[r], experts[r], Segments.one(r.stop - r.start)) for r in rows]
    whole = weight_gradient(x, cotangent, experts, sequences(1, 2, 1, 1))
    assert_bit_equal(whole, jax.jit(lambda *t: trees.fold(jnp.add, t))(*alone))
    # An aligned half of the run is a subtree, and an absent sequence is zero.
    half = weight_gradient(x[rows[2].start :], cotangent[rows[2].start :], experts[rows[2].start :], sequences(1, 1))
    assert_bit_equal(half, alone[2] + alone[3])
    three = weight_gradient(x[:256], cotangent[:256], experts[:256], sequences(1, 2, 1, 0))
    assert_bit_equal(three, (alone[0] + alone[1]) + alone[2])
    # Rows of several sequences in common tiles: another sum.
    assert differing(whole, weight_gradient(x, cotangent, experts, sequences(5))) > 1000


def test_a_sequence_chains_products_of_sixteen_pairs_in_row_order():
    x, cotangent = random(0, 64, 32), random(1, 64, 48)
    experts = jnp.where(jnp.arange(64)[:, None] % 3 == 0, EXPERTS, 1)
    got = weight_gradient(x, cotangent, experts, Segments.one(64))[1]
    here = [r for r in range(64) if r % 3]
    total = np.zeros((48, 32), np.float32)
    for start in range(0, len(here), TILE):
        block = np.zeros((48, 32))
        for r in here[start : start + TILE]:  # A chain of fused multiply-adds, as `tile.dot` promises.
            block = (block + np.outer(np.float64(cotangent[r]), np.float64(x[r]))).astype(np.float32).astype(np.float64)
        total += block.astype(np.float32)
    assert_bit_equal(got, total)


def test_autodiff_adds_nothing():
    plan = make_plan(random_experts(70), EXPERTS)

    def program(ops):
        def total(x, w):
            return jnp.sum(ops.grouped_linear(ops.gather_rows(x, plan), w, plan))

        return str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(random(0, 70, 32), random(1, EXPERTS, 48, 32)))

    assert "scatter" not in program(experts)
    assert "add_any" not in program(experts)
    assert "scatter-add" in program(stock)


def test_weights_of_other_experts_are_refused():
    plan = make_plan(random_experts(70), EXPERTS)
    with pytest.raises(ValueError, match="weights of 4 experts for a plan of 5"):
        grouped_linear(jnp.zeros((plan.row.shape[0], 32)), jnp.zeros((4, 48, 32)), plan)
