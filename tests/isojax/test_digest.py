"""Fingerprints: of values here, of programs below."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from isojax.bits import digest
from isojax.contract import gradient_digest, program_digest
from isojax.errors import ContractError
from pallas_kernels.region import region_call
from pallas_kernels.rms_norm import rms_norm


def tree():
    return {"norm": jnp.ones(3), "layers": {"0": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "1": jnp.int32(4)}}


def test_a_digest_does_not_depend_on_the_order_or_kind_of_containers():
    other = {"layers": [tree()["layers"]["0"], np.int32(4)], "norm": np.ones(3, np.float32)}
    assert digest(tree()) == digest(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"norm": t["norm"].at[1].set(1.0000001)},
        lambda t: t | {"norm": t["norm"].astype(jnp.bfloat16)},
        lambda t: t | {"norm": t["norm"][None]},
        lambda t: t | {"scale": t.pop("norm")},
        lambda t: t | {"more": jnp.zeros(0)},
        lambda t: t | {"norm": -t["norm"] * 0},
    ],
)
def test_a_digest_sees_bits_dtypes_shapes_and_names(change):
    assert digest(change(tree())) != digest(tree())


def test_zeros_of_two_signs_have_two_digests():
    assert digest(jnp.zeros(2)) != digest(-jnp.zeros(2))


def test_a_sharded_array_has_the_digest_of_the_whole():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.arange(8.0)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    assert digest(sharded) == digest(x)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        digest({"a": {"b": 1}, "a.b": 2})


# Programs.

X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
TABLE = np.arange(64, dtype=np.float32)


def accumulate(*, reverse: bool = False, name: str = "accumulate", add=jnp.add):
    """A chain over blocks of rows, forward or reversed: one index map apart."""

    def kernel(x_ref, sum_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] = add(sum_ref[...], x_ref[...])

    return region_call(
        name,
        kernel,
        out_shape=jax.ShapeDtypeStruct((1, 64), jnp.float32),
        grid=(8,),
        in_specs=[pl.BlockSpec((1, 64), lambda i: (7 - i if reverse else i, 0))],
        out_specs=pl.BlockSpec((1, 64), lambda i: (0, 0)),
    )


def with_gradient(sign: float):
    @jax.custom_vjp
    def op(x):
        return x * 2.0

    op.defvjp(lambda x: (op(x), None), lambda _, g: (g * sign,))
    return op


def test_a_reversed_accumulation_has_another_digest():
    assert program_digest(accumulate(reverse=True), X) != program_digest(accumulate(), X)
    one, other = (jax.make_jaxpr(accumulate(reverse=r))(X) for r in (False, True))
    assert str(one) == str(other)  # Why text will not do.


def test_other_captured_constants_have_another_digest():
    def scaled(table):
        return lambda x: x * jnp.asarray(table)

    changed = TABLE.copy()
    changed[63] = 62.999996
    assert program_digest(scaled(TABLE), X) == program_digest(scaled(TABLE.copy()), X)
    assert program_digest(scaled(changed), X) != program_digest(scaled(TABLE), X)
    assert program_digest(lambda x: x * 0.1, X) != program_digest(lambda x: x * 0.10000001, X)


def test_a_backward_of_the_other_sign_has_another_digest_though_the_forward_program_is_the_same():
    plus, minus = with_gradient(1.0), with_gradient(-1.0)
    assert program_digest(plus, X) != program_digest(minus, X)
    assert gradient_digest(plus, X) != gradient_digest(minus, X)
    assert program_digest(plus, X) == program_digest(with_gradient(1.0), X)
    nested = [
        program_digest(jax.jit(lambda x, op=op: lax.scan(lambda c, r: (op(c), r), x, x)), X) for op in (plus, minus)
    ]
    assert nested[0] != nested[1]


def test_a_custom_jvp_counts():
    def op(scale):
        fn = jax.custom_jvp(lambda x: x)
        fn.defjvp(lambda primals, tangents: (primals[0], tangents[0] * scale))
        return fn

    assert program_digest(op(1.0), X) != program_digest(op(2.0), X)


def test_another_region_name_has_another_digest():
    assert program_digest(accumulate(name="other"), X) != program_digest(accumulate(), X)


def test_names_of_variables_and_functions_and_moved_lines_have_the_same_digest():
    source = (
        "import jax, jax.numpy as jnp\n{pad}def {fn}({arg}):\n  {out} = jax.jit(jnp.sin)({arg}) * 2\n  return {out}\n"
    )

    def compiled(**names):
        scope = {}
        exec(compile(source.format(**names), f"/somewhere/{names['fn']}.py", "exec"), scope)
        return scope[names["fn"]]

    one = compiled(pad="", fn="first", arg="x", out="y")
    other = compiled(pad="\n\n\n\n", fn="second", arg="value", out="result")
    assert program_digest(jax.jit(one), X) == program_digest(jax.jit(other), X)
    assert program_digest(lambda x: one(x), X) == program_digest(one, X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1.0, lambda x: x - 1.0),
        (lambda x: (x[0], x[1]), lambda x: (x[1], x[0])),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (
            lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x),
            lambda x: lax.scan(lambda c, r: (r + c, None), x[0], x),
        ),
        (lambda x: x @ x.T, lambda x: jnp.matmul(x, x.T, precision="highest")),
        (lambda x: x[::-1], lambda x: x),
        (
            lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x, unroll=2),
            lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x),
        ),
    ],
)
def test_another_computation_has_another_digest(one, other):
    assert program_digest(one, X) != program_digest(other, X)


def test_shapes_and_dtypes_count():
    digests = {
        program_digest(jnp.sin, jax.ShapeDtypeStruct(s, d)) for s in [(8,), (8, 1)] for d in ["float32", "bfloat16"]
    }
    assert len(digests) == 4


def test_only_the_branch_of_the_platform_counts():
    def switch(cuda):
        return lambda x: lax.platform_dependent(x, cpu=jnp.sin, cuda=cuda)

    assert program_digest(switch(jnp.cos), X, platform="cpu") == program_digest(switch(jnp.tan), X, platform="cpu")
    assert program_digest(switch(jnp.cos), X, platform="gpu") != program_digest(switch(jnp.tan), X, platform="gpu")
    with pytest.raises(ContractError, match="no branch for tpu"):
        program_digest(switch(jnp.cos), X, platform="tpu")


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit])
def test_a_region_is_traced_for_the_platform_that_is_asked(wrap):
    args = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.float32)
    digests = [program_digest(wrap(rms_norm), *args, platform=p) for p in ("cpu", "cuda", "gpu", "cpu")]
    assert digests[0] == digests[3] != digests[1] == digests[2]


def test_a_parameter_of_unknown_type_is_refused_by_name():
    with pytest.raises(ContractError, match=r"pure_callback\.callback has a value of type numpy\.ufunc"):
        program_digest(lambda x: jax.pure_callback(np.sin, X, x), X)


def test_an_op_that_refuses_a_gradient_has_a_digest_and_no_gradient_digest():
    @jax.custom_vjp
    def op(x):
        return x

    def refuse(*_):
        raise TypeError("op has no gradient")

    op.defvjp(refuse, refuse)
    assert program_digest(op, X) != program_digest(lambda x: x, X)
    with pytest.raises(TypeError, match="no gradient"):
        gradient_digest(op, X)


def test_gradients_of_integer_arguments_are_no_part_of_the_gradient():
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert gradient_digest(lambda x, i: (x[i], i), X, rows) != gradient_digest(lambda x, i: (x[i] * 2, i), X, rows)


def test_digests_are_the_same_in_another_process():
    code = (
        "import jax, jax.numpy as jnp; from isojax.contract import gradient_digest, program_digest;"
        "from pallas_kernels.rms_norm import rms_norm; S = jax.ShapeDtypeStruct;"
        "args = S((64, 64), jnp.bfloat16), S((64,), jnp.float32);"
        "print(program_digest(rms_norm, *args), gradient_digest(rms_norm, *args))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    args = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.float32)
    assert other.stdout.split() == [program_digest(rms_norm, *args), gradient_digest(rms_norm, *args)]
