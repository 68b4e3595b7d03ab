"""The row-wise regions at the sizes of Qwen3.5-35B-A3B: what is lowered on the CPU and run on a GPU."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import cast as cast_op
from pallas_kernels.causal_conv import causal_conv_decode
from pallas_kernels.causal_conv import reference as conv_reference
from pallas_kernels.fork import fork
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gated_norm import reference as gated_norm_reference
from pallas_kernels.gdn_gates import gdn_gates
from pallas_kernels.gdn_gates import reference as gates_reference
from pallas_kernels.l2_norm import l2_norm
from pallas_kernels.l2_norm import reference as l2_norm_reference
from pallas_kernels.moe_combine import reference as combine_reference
from pallas_kernels.moe_combine.op import _combine
from pallas_kernels.norm_rope import norm_rope
from pallas_kernels.norm_rope import reference as norm_rope_reference
from pallas_kernels.output_gate import output_gate
from pallas_kernels.output_gate import reference as output_gate_reference
from pallas_kernels.residual_add import reference as residual_reference
from pallas_kernels.residual_add import residual_add
from pallas_kernels.rms_norm import reference as rms_norm_reference
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.router import load_balancing_loss, router
from pallas_kernels.router import reference as router_reference
from pallas_kernels.swiglu import reference as swiglu_reference
from pallas_kernels.swiglu import swiglu, swiglu_fused


@dataclasses.dataclass(frozen=True)
class Case:
    """An op, its definition, and its arguments by shape: `rows` have a leading axis of rows, `shared` have not."""

    op: Callable
    reference: Callable
    rows: tuple
    shared: tuple = ()

    def shapes(self, count: int, dtype: str) -> list[jax.ShapeDtypeStruct]:
        of_rows = [jax.ShapeDtypeStruct((count, *shape), _dtype(kind, dtype)) for kind, *shape in self.rows]
        return of_rows + [jax.ShapeDtypeStruct(tuple(shape), _dtype(kind, dtype)) for kind, *shape in self.shared]

    def arguments(self, count: int, dtype: str) -> list[jax.Array]:
        def random(seed, of):
            key = jax.random.key(seed)
            if of.dtype == jnp.bool_:
                return jax.random.bernoulli(key, 0.9, of.shape)
            if of.dtype == jnp.int32:
                return jax.random.randint(key, of.shape, 0, 100, jnp.int32)
            return jax.random.normal(key, of.shape, jnp.float32).astype(of.dtype)

        return [random(seed, of) for seed, of in enumerate(self.shapes(count, dtype))]


def _dtype(kind: str, dtype: str):
    return {"x": jnp.dtype(dtype), "f": jnp.dtype("float32"), "i": jnp.dtype("int32"), "b": jnp.dtype("bool")}[kind]


def _rope(norm_rope):
    return lambda x, cos, sin, scale: norm_rope(x, scale, cos, sin)


CASES = {
    "rms_norm": Case(
        rms_norm, lambda x, s: rms_norm_reference.rms_norm(x, s, eps=1e-6), (("x", 2048),), (("f", 2048),)
    ),
    "norm_rope": Case(
        _rope(norm_rope),
        lambda x, cos, sin, s: norm_rope_reference.norm_rope(x, cos, sin, jnp.broadcast_to(s, x.shape[1:]), eps=1e-6),
        (("x", 16, 256), ("f", 32), ("f", 32)),
        (("f", 256),),
    ),
    "norm_rope.keys": Case(
        _rope(norm_rope),
        lambda x, cos, sin, s: norm_rope_reference.norm_rope(x, cos, sin, jnp.broadcast_to(s, x.shape[1:]), eps=1e-6),
        (("x", 2, 256), ("f", 32), ("f", 32)),
        (("f", 256),),
    ),
    "output_gate": Case(output_gate, output_gate_reference.output_gate, (("x", 4096), ("x", 4096))),
    "l2_norm": Case(
        lambda x: l2_norm(x, scale=0.125), lambda x: l2_norm_reference.l2_norm(x, scale=0.125), (("x", 16, 128),)
    ),
    "gated_norm": Case(
        gated_norm,
        lambda o, z, s: gated_norm_reference.gated_norm(o, z, s, eps=1e-6),
        (("x", 32, 128), ("x", 32, 128)),
        (("f", 128),),
    ),
    "gdn_gates": Case(gdn_gates, gates_reference.gdn_gates, (("x", 32), ("x", 32)), (("f", 32), ("f", 32))),
    "causal_conv.decode": Case(
        lambda x, window, w: causal_conv_decode(x, window, w)[0],
        lambda x, window, w: conv_reference.causal_conv_decode(x, window, w)[0],
        (("x", 8192), ("x", 3, 8192)),
        (("f", 8192, 4),),
    ),
    "swiglu": Case(swiglu, swiglu_reference.swiglu, (("x", 512), ("x", 512))),
    "swiglu_fused": Case(swiglu_fused, swiglu_reference.swiglu_fused, (("x", 1024),)),
    "residual_add": Case(residual_add, residual_reference.residual_add, (("x", 2048), ("x", 2048))),
    "router": Case(
        lambda x, valid: router(x, valid, top_k=8),
        lambda x, valid: router_reference.router(x, valid, top_k=8),
        (("f", 256), ("b",)),
    ),
    "load_balancing_loss": Case(
        lambda x, valid, counts: load_balancing_loss(x, valid, counts, top_k=8),
        lambda x, valid, counts: router_reference.load_balancing_loss(x, valid, counts, top_k=8),
        (("f", 256), ("b",)),
        (("i", 256),),
    ),
    "moe_combine": Case(_combine, combine_reference.combine, (("x", 8, 2048), ("f", 8), ("x", 2048), ("x", 1))),
    "cast": Case(lambda x: cast_op.cast(x, jnp.bfloat16), lambda x: x.astype(jnp.bfloat16), (("f", 1000),)),
}

GRADIENTS = {name: case for name, case in CASES.items() if name != "causal_conv.decode"}  # Decoding has no gradient.


def gradient(op: Callable) -> Callable:
    """(*arguments) -> the gradients of the float arguments, for cotangents that are the squares of the results."""

    def fn(*args):
        floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*chosen):
            full = list(args)
            for i, x in zip(floats, chosen, strict=True):
                full[i] = x
            results = jax.tree.leaves(op(*full))
            return [r for r in results if jnp.issubdtype(r.dtype, jnp.floating)]

        results, pull = jax.vjp(of_floats, *(args[i] for i in floats))
        return pull([r * r for r in results])

    return fn


def fan_out(x: jax.Array) -> jax.Array:
    """Something whose gradient is `fork.backward` alone."""
    return jnp.concatenate(fork(x, 3), axis=1)
