"""One weight that all heads share, with a written order of its gradient."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.region import mosaic, region_call, traced_for
from pallas_kernels.share_over_heads import reference


def share_over_heads(
    scale: Float[Array, " head_dim"], heads: int, *, num_splits: int | None = None
) -> Float[Array, "heads head_dim"]:
    """Gives every head its copy of `scale`, whose gradient adds the heads as `reference.head_sum`.

    An op that takes the copies sums over rows first, head by head; the heads meet last. So a
    tensor-parallel rank that holds whole splits computes a subtree.

    Args:
        scale: The shared weight.
        heads: Number of heads.
        num_splits: Splits of the heads, the leaves of the gradient's tree; gcd(heads, 8) by default.

    Raises:
        ValueError: If `num_splits` does not divide the heads.
    """
    if num_splits and heads % num_splits:
        raise ValueError(f"share_over_heads cuts {heads} heads into num_splits={num_splits}: choose a divisor")
    return _share(heads, num_splits, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _share(heads, num_splits, scale):
    del num_splits
    return reference.share_over_heads(scale, heads)


def _backward(heads, num_splits, _, grad):
    del heads

    def kernel(
        grad_ref,  # [heads, head_dim]
        sum_ref,  # [head_dim]
    ):
        sum_ref[...] = reference.head_sum(grad_ref[...], num_splits)

    shape = jax.ShapeDtypeStruct(grad.shape[1:], grad.dtype)
    name = "share_over_heads.backward"
    if traced_for() != "cpu":
        before, after = (jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in (grad, shape))
        call = mosaic().row_call(
            name, lambda x: [reference.head_sum(x[0], num_splits)[None]], [before], [], [after], block=1
        )
        return (call(grad[None])[0][0],)
    return (region_call(name, kernel, out_shape=shape)(grad),)


_share.defvjp(lambda heads, num_splits, scale: (_share(heads, num_splits, scale), None), _backward)
