"""Whole rows meet row by row: no lane, block or neighbour decides a bit."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from pallas_kernels.causal_conv.windows import HISTORY, TAPS
from pallas_kernels.region import exact_product, region_call
from pallas_kernels.tree_sum import fold_axis


def convolve(rows: list[jax.Array], taps: jax.Array) -> jax.Array:
    """Σ_j taps[j] · rows[j] in float32, ascending j, every product rounded."""
    total = exact_product(rows[0].astype(jnp.float32), taps[0])
    for j in range(1, TAPS):
        total = total + exact_product(rows[j].astype(jnp.float32), taps[j])
    return total


def forward(
    extended: Float[Array, "blocks extended channels"], taps: Float32[Array, "4 channels"]
) -> Float[Array, "blocks rows channels"]:
    """silu of the convolution, one block a program; `extended` has three rows more than the result."""
    rows = extended.shape[1] - HISTORY

    def causal_conv_kernel(
        extended_ref,  # [1, rows + 3, channels]
        taps_ref,  # [4, channels]
        y_ref,  # [1, rows, channels]
    ):
        total = convolve([extended_ref[0, j : j + rows] for j in range(TAPS)], taps_ref[...])
        y_ref[0] = jax.nn.silu(total).astype(y_ref.dtype)

    return _call("causal_conv", causal_conv_kernel, [extended, taps], [(rows, extended.dtype)])[0]


def backward_inner(
    extended: Float[Array, "blocks extended channels"],
    y_grad: Float[Array, "blocks rows channels"],
    taps: Float32[Array, "4 channels"],
) -> tuple[Float32[Array, "blocks rows channels"], Float32[Array, "blocks 4 channels"]]:
    """The gradient before SiLU, and each block's sum of its products with the rows of every tap, in tree order."""
    rows = y_grad.shape[1]

    def causal_conv_backward_kernel(
        extended_ref,  # [1, rows + 3, channels]
        y_grad_ref,  # [1, rows, channels]
        taps_ref,  # [4, channels]
        inner_ref,  # [1, rows, channels]
        taps_grad_ref,  # [1, 4, channels]
    ):
        inputs = [extended_ref[0, j : j + rows] for j in range(TAPS)]
        total = convolve(inputs, taps_ref[...])
        gate = jax.nn.sigmoid(total)
        slope = gate * (1.0 + exact_product(total, 1.0 - gate))
        inner = y_grad_ref[0].astype(jnp.float32) * slope
        inner_ref[0] = inner
        sums = [fold_axis(exact_product(inner, x.astype(jnp.float32)), 0) for x in inputs]
        taps_grad_ref[0] = lax.concatenate(sums, 0)

    f32 = jnp.float32
    return _call(
        "causal_conv.backward", causal_conv_backward_kernel, [extended, y_grad, taps], [(rows, f32), (TAPS, f32)]
    )


def backward_outer(
    following: Float32[Array, "blocks extended channels"], taps: Float32[Array, "4 channels"], dtype
) -> Float[Array, "blocks rows channels"]:
    """The gradient of every row: Σ_i taps[3 − i] · following[row + i], ascending i."""
    rows = following.shape[1] - HISTORY

    def causal_conv_input_kernel(
        following_ref,  # [1, rows + 3, channels]
        taps_ref,  # [4, channels]
        x_grad_ref,  # [1, rows, channels]
    ):
        total = convolve([following_ref[0, i : i + rows] for i in range(TAPS)], taps_ref[...][::-1])
        x_grad_ref[0] = total.astype(x_grad_ref.dtype)

    return _call("causal_conv.backward_input", causal_conv_input_kernel, [following, taps], [(rows, dtype)])[0]


def _call(name: str, kernel, inputs, outputs):
    """One program for each block; the last input is shared."""
    blocks, _, channels = inputs[0].shape

    def spec(rows):
        return pl.BlockSpec((1, rows, channels), lambda i: (i, 0, 0))

    return region_call(
        name,
        kernel,
        out_shape=[jax.ShapeDtypeStruct((blocks, rows, channels), dtype) for rows, dtype in outputs],
        grid=(blocks,),
        in_specs=[*(spec(x.shape[1]) for x in inputs[:-1]), pl.BlockSpec(inputs[-1].shape, lambda i: (0, 0))],
        out_specs=[spec(rows) for rows, _ in outputs],
    )(*inputs)
