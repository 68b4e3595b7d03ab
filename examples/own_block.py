"""python examples/own_block.py

My own block under `shard_map`: one loss and one gradient, whatever the tensor parallelism.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax import P

import isojax
from isojax import collectives, ops

TOKENS, EMBED, HIDDEN = 512, 64, 128
SPECS = {
    "scale": P(),
    "gate": P("tensor", None),
    "up": P("tensor", None),
    "down": P(None, "tensor"),
}  # [outputs, inputs]
ROWS = P("tensor", None)  # sequence parallel between blocks


@ops.rowwise  # my own op: jnp inside, fixed row block, barrier, with its VJP
def relu2_gate(gate, up):
    return jnp.square(jax.nn.relu(gate)) * up


@ops.rowwise
def squared_error(y, target):
    return jnp.sum(jnp.square(y.astype(jnp.float32) - target.astype(jnp.float32)), axis=1)


def loss(params, x, target):  # per device: x, target bfloat16 [tokens / tp, embed]; params float32
    x, skip = ops.fork(x)  # autodiff's hidden `add_any`, as an op
    h = ops.rms_norm(x, params["scale"], axis_name="tensor")  # d scale: as on one device, not a hidden psum
    gate, up = ops.column_linear(h, (params["gate"], params["up"]), axis_name="tensor", gather_axis=0)
    y = ops.row_linear(relu2_gate(gate, up), params["down"], axis_name="tensor", scatter_axis=0)
    error = squared_error(ops.residual_add(skip, y), target)  # float32 [tokens / tp]
    return collectives.psum(ops.tree_sum(error), "tensor")  # replicated: out_specs=P() just works


def step(tp: int):
    """(params, x, target) -> loss and gradients of params and x; the gradient is taken inside `shard_map`."""
    mesh = jax.make_mesh((tp,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:tp])
    grad = jax.value_and_grad(loss, argnums=(0, 1))
    specs = (SPECS, ROWS, ROWS)
    return jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=(P(), specs[:2]), check_vma=False))


def arguments(dtype=jnp.bfloat16):
    """Parameters, inputs and targets."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {"scale": (EMBED,), "gate": (HIDDEN, EMBED), "up": (HIDDEN, EMBED), "down": (EMBED, HIDDEN)}
    params = {name: 0.1 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    x, target = (jax.random.normal(next(keys), (TOKENS, EMBED)).astype(dtype) for _ in range(2))
    return params, x, target


def main() -> None:
    args = arguments()
    want = isojax.digest(step(1)(*args))
    for tp in (1, 2, 4, 8):
        print(tp, isojax.digest(step(tp)(*args)) == want)
    isojax.audit(step(8), *args).raise_if_findings()  # no float sum outside an op or a tree


if __name__ == "__main__":
    main()
