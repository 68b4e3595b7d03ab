"""An audit finds every float that is computed outside a region, and nothing else."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import isojax.audit
from isojax.audit import Allow, audit, dtype_signature, load_target
from isojax.errors import AuditError
from pallas_kernels.fork import fork
from pallas_kernels.region import region_call
from pallas_kernels.rms_norm import rms_norm

X = jax.ShapeDtypeStruct((8, 32), jnp.float32)
HALF = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((4,), jnp.int32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
SCALE = jax.ShapeDtypeStruct((32,), jnp.float32)


def primitives(report):
    return [finding.primitive for finding in report.findings]


@pytest.mark.parametrize(
    ("primitive", "fn", "args"),
    [
        ("add", lambda x: x + x, [X]),
        ("add", lambda s: s + 1.0, [SCALAR]),
        ("neg", lambda x: -x, [X]),
        ("mul", lambda x: x * 2, [X]),
        ("exp", jnp.exp, [X]),
        ("max", jax.nn.relu, [X]),
        ("reduce_sum", lambda x: jnp.sum(x, 0), [X]),
        ("reduce_max", lambda x: jnp.max(x, 0), [X]),
        ("cumsum", lambda x: jnp.cumsum(x, 0), [X]),
        ("dot_general", lambda x: x @ x.T, [X]),
        ("convert_element_type", lambda x: x.astype(jnp.float32), [HALF]),
        ("convert_element_type", lambda x: x.astype(jnp.bfloat16), [X]),
        ("convert_element_type", lambda i: i.astype(jnp.float32), [ROWS]),
        ("reduce_precision", lambda x: lax.reduce_precision(x, 8, 7), [X]),
        ("scatter-add", lambda x, i: x.at[i].add(1.0), [X, ROWS]),
        ("sort", lambda x: jnp.sort(x, 0), [X]),
        ("argmax", lambda x: jnp.argmax(x, 0), [X]),
        ("top_k", lambda x: lax.top_k(x, 2), [X]),
    ],
)
def test_float_arithmetic_outside_a_region_is_found(primitive, fn, args):
    assert primitives(audit(fn, *args)) == [primitive]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x.reshape(4, 64).T[::-1],
        lambda x, i: x[i],
        lambda x, i: x.at[i].set(0.0, unique_indices=True),
        lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
        lambda x, i: jnp.pad(x, ((0, 1), (0, 0))),
        lambda x, i: jnp.where(x > 0, x, 0),
        lambda x, i: jnp.concatenate([x, jnp.zeros((1, 32)), jnp.full((1, 32), 2)]),
        lambda x, i: lax.dynamic_update_slice(x, x[:1], (i[0], 0)),
        lambda x, i: lax.bitcast_convert_type(x, jnp.int32) + 1,
        lambda x, i: jnp.cumsum(i) * i + jnp.argmax(i),
        lambda x, i: jnp.stack(jnp.split(x, 2)),
        lambda x, i: lax.stop_gradient(lax.optimization_barrier(x)),
        lambda x, i: jnp.isnan(x).any(),
        lambda x, i: jax.random.bits(jax.random.key(0), (4,)),
    ],
)
def test_moving_floats_and_computing_integers_is_no_finding(fn):
    audit(fn, X, ROWS).raise_if_findings()


@pytest.mark.parametrize(
    ("path", "fn"),
    [
        ("jit", lambda x: jax.jit(lambda y: y + 1.0)(x)),
        ("scan", lambda x: lax.scan(lambda c, r: (c + r, None), x[0], x)[0]),
        ("while", lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1.0), (0, x))[1]),
        ("cond", lambda x: lax.cond(jnp.isnan(x[0, 0]), lambda y: y + 1.0, lambda y: y, x)),
        ("remat2", jax.checkpoint(lambda x: x + 1.0)),
        ("custom_vjp_call", lambda x: _identity_that_adds(x)),
        ("cond", lambda x: lax.platform_dependent(x, cpu=lambda y: y, cuda=lambda y: y + 1.0)),
    ],
)
def test_findings_inside_programs_name_the_path(path, fn):
    report = audit(fn, X)
    assert primitives(report) == ["add"]
    assert path in next(iter(report.findings)).path


@jax.custom_vjp
def _identity_that_adds(x):
    return x + 1.0


_identity_that_adds.defvjp(lambda x: (x, None), lambda _, g: (g,))


def test_a_body_that_is_called_twice_is_one_finding():
    @jax.jit
    def twice(x):
        return x + 1.0

    assert list(audit(lambda x: (twice(x), twice(x)), X).findings.values()) == [2]


def test_what_autodiff_adds_at_a_fan_out_is_found_and_fork_replaces_it():
    def gradient(reader):
        return lambda x, scale: jax.vjp(reader, x, scale)[1]((x, x))

    def careless(x, scale):
        return rms_norm(x, scale), x

    def forked(x, scale):
        one, other = fork(x, 2)
        return rms_norm(one, scale), other

    found = audit(gradient(careless), X, SCALE)
    assert primitives(found) == ["add_any"]
    assert "fork" in next(iter(found.findings)).use
    audit(gradient(forked), X, SCALE).raise_if_findings()


def test_collectives_that_add_are_found_under_shard_map_and_in_its_gradient():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def sharded(fn, out):
        return jax.shard_map(fn, mesh=mesh, in_specs=P("tensor"), out_specs=out, check_vma=False)

    total = audit(sharded(lambda x: lax.psum(x, "tensor"), P()), X)
    assert primitives(total) == ["psum"]

    gather = lambda x: lax.all_gather(x, "tensor", tiled=True)  # noqa: E731
    audit(sharded(gather, P()), X).raise_if_findings()
    pulled = audit(sharded(lambda x: jax.vjp(gather, x)[1](gather(x))[0], P("tensor")), X)
    assert primitives(pulled) == ["reduce_scatter"]
    audit(sharded(lambda x: lax.psum(x.shape[0] + lax.axis_index("tensor"), "tensor"), P()), X).raise_if_findings()


def test_regions_are_counted_by_call_site_for_one_platform():
    def program(x, scale):
        return rms_norm(rms_norm(x, scale), scale)

    report = audit(program, X, SCALE)
    report.raise_if_findings()
    assert report.regions == {"rms_norm": 2}
    assert audit(jax.grad(lambda x, s: program(x, s)[0, 0]), X, SCALE).regions["rms_norm.backward"] == 2


def copy_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...]


def test_a_kernel_without_a_name_is_found():
    unnamed = audit(pl.pallas_call(copy_kernel, out_shape=X), X)
    assert "without a name" in str(unnamed)
    assert unnamed.regions == {}


def test_an_interpreted_kernel_without_barriers_is_found():
    call = pl.pallas_call(copy_kernel, out_shape=X, name="copy", interpret=True)
    barrier = lax.optimization_barrier
    audit(lambda x: barrier(call(barrier(x))), X).raise_if_findings()
    audit(region_call("copy", copy_kernel, out_shape=X), X).raise_if_findings()
    for bare in (call, lambda x: call(barrier(x)), lambda x: barrier(call(x))):
        assert "without barriers" in str(audit(bare, X))


def test_a_compiler_option_that_changes_rounding_is_found():
    fast = jax.jit(lambda x: x.T, compiler_options={"xla_cpu_enable_fast_math": True})
    assert "xla_cpu_enable_fast_math" in str(audit(fast, X))
    audit(jax.jit(lambda x: x.T, compiler_options={"xla_cpu_enable_fast_math": False}), X).raise_if_findings()


def test_a_cast_of_a_captured_array_is_found_and_of_a_literal_is_not():
    table = np.ones(32, np.float32)
    assert primitives(audit(lambda x: (x, jnp.asarray(table).astype(jnp.bfloat16)), X)) == ["convert_element_type"]
    audit(lambda x: jnp.where(x > 0, x, jnp.zeros((), jnp.int32)), HALF).raise_if_findings()


def test_the_error_names_line_function_shapes_and_what_to_use():
    def loss(x):
        return jnp.sum(x)

    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(
        AuditError, match=rf"test_audit\.py:{line} \(.*loss\) jnp\.sum float32\[8,32\] outside an op"
    ) as e:
        audit(loss, X).raise_if_findings()
    assert "use ops.tree_sum" in str(e.value)
    assert e.value.exit_code == 1


def test_several_findings_are_listed_together():
    with pytest.raises(AuditError, match=r"2 findings\n.*\n.*"):
        audit(lambda x: jnp.exp(x) * 2.0, X).raise_if_findings()


def test_an_allowed_finding_stays_in_the_report_with_its_reason():
    def metric(x):
        return jnp.sum(x)

    report = audit(metric, X, allow=[Allow("reduce_sum", "metric", "printed, never read by the update")])
    report.raise_if_findings()
    assert report.to_json()["allowed"][0]["reason"] == "printed, never read by the update"
    assert primitives(audit(metric, X, allow=[Allow("reduce_sum", "elsewhere", "another function")])) == ["reduce_sum"]
    assert primitives(audit(metric, X, allow=[Allow("add", "metric", "another primitive")])) == ["reduce_sum"]
    with pytest.raises(ValueError, match="written reason"):
        Allow("add", "metric", " ")


def test_a_cast_around_the_scored_path_changes_its_dtype_signature():
    def scored(x, scale):
        return rms_norm(x, scale)

    golden = [("rms_norm", ("bfloat16", "float32"), ("bfloat16",))]
    assert dtype_signature(scored, HALF, SCALE) == golden
    autocast = lambda x, scale: scored(x.astype(jnp.float32), scale)  # noqa: E731
    assert dtype_signature(autocast, HALF, SCALE) != golden


def test_the_package_is_also_the_function():
    assert primitives(isojax.audit(lambda x: -x, X)) == ["neg"]


def test_a_target_is_loaded_with_its_arguments_or_refused():
    module = types.ModuleType("audit_target_example")
    module.loss, module.loss_args, module.bare = jnp.sum, lambda: (X,), jnp.sum
    sys.modules[module.__name__] = module
    fn, args = load_target("audit_target_example:loss")
    assert primitives(audit(fn, *args)) == ["reduce_sum"]
    for text, why in [
        ("audit_target_example", "package.module:function"),
        ("audit_target_example:absent", "has no function"),
        ("audit_target_example:bare", "no arguments"),
        ("no_such_module:loss", "No module named"),
    ]:
        with pytest.raises(AuditError, match=why):
            load_target(text)
