"""Dataclasses that JAX takes apart and puts together again."""

import dataclasses

import jax


def pytree[T](cls: type[T]) -> type[T]:
    """Registers the dataclass `cls` as a pytree; fields with metadata `static` are part of its structure.

    Like `jax.tree_util.register_dataclass`, but JAX rebuilds an instance without its constructor: inside
    transformations leaves may be anything (shapes, placeholders, no gradient), and types that are
    checked on construction would refuse them.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten(value: T):
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in data]
        return leaves, tuple(getattr(value, name) for name in static)

    def unflatten(structure, leaves) -> T:
        value = object.__new__(cls)
        for name, leaf in zip([*data, *static], [*leaves, *structure], strict=True):
            object.__setattr__(value, name, leaf)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
