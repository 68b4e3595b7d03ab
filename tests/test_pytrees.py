import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from isojax.layouts import Segments


@jax.custom_vjp
def scale(x, segments):
    return x * segments.count


scale.defvjp(lambda x, segments: (scale(x, segments), segments.count), lambda count, g: (g * count, None))


def test_a_dataclass_of_integers_passes_through_a_custom_gradient():
    segments = Segments(jnp.zeros(2, jnp.int32), 3)
    assert jax.jit(jax.grad(scale))(1.0, segments) == 3.0


def test_leaves_may_be_anything_while_constructors_are_checked():
    segments = Segments.one(128)
    assert jax.tree.map(lambda leaf: leaf.shape, segments).sequence == (2,)
    with pytest.raises(TypeCheckError):
        Segments((2,), 1)  # pyright: ignore[reportArgumentType]


def test_static_fields_are_structure_and_leaves_have_names():
    segments = Segments.one(64)
    assert dataclasses.replace(segments, count=2).count == 2
    assert jax.tree.structure(segments) != jax.tree.structure(dataclasses.replace(segments, count=2))
    [(path, _)] = jax.tree_util.tree_leaves_with_path(segments)
    assert jax.tree_util.keystr(path) == ".sequence"
