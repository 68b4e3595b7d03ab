"""What a rank of a mesh axis may hold: whole splits of a summed axis, whole blocks of rows."""

from jax import lax

from isojax.errors import ShardingError
from isojax.layouts import CHUNK

type AxisName = str | tuple[str, ...]
"""A mesh axis, or several, whose ranks count in row-major order."""


def axis_size(axis_name: AxisName | None) -> int:
    """Ranks of the axis inside `jax.shard_map`; one without an axis."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def splits_of_rank(op: str, setting: str, num_splits: int, axis_name: AxisName | None) -> int:
    """How many of `num_splits` splits a rank holds: an aligned run that is a subtree of `trees.fold`.

    Raises:
        ShardingError: If ranks would share a split, or hold a run that is no subtree.
    """
    ranks = axis_size(axis_name)
    if not _fits(num_splits, ranks):
        choices = [str(n) for n in range(1, num_splits + 1) if _fits(num_splits, n)]
        raise ShardingError(
            f"{op}: {setting}={num_splits} does not divide over {axis_name}={ranks} into whole subtrees:"
            f" shard over {' or '.join(choices)} ranks"
        )
    return num_splits // ranks


def _fits(num_splits: int, ranks: int) -> bool:
    local, rest = divmod(num_splits, ranks)
    return ranks == 1 or (rest == 0 and local & (local - 1) == 0)


def check_subtrees(op: str, terms: int, axis_name: AxisName | None) -> None:
    """Refuses `terms` a rank that are no subtree of `trees.fold` over the terms of all ranks.

    Raises:
        ShardingError: If they are not a power of two.
    """
    ranks = axis_size(axis_name)
    if not _fits(terms * ranks, ranks):
        raise ShardingError(
            f"{op} got {terms} terms a rank over {axis_name}={ranks}, which are no subtree: give every rank a power of"
            " two"
        )


def rows_of_all(op: str, rows: int, axis_name: AxisName | None) -> int:
    """How many rows all ranks hold together, each `rows`, whole blocks of the grid.

    Raises:
        ShardingError: If ranks would share a block.
    """
    ranks = axis_size(axis_name)
    if ranks > 1 and rows % CHUNK:
        raise ShardingError(
            f"{op} adds rows in blocks of {CHUNK}, got {rows} rows a rank over {axis_name}={ranks}: give every rank a"
            f" multiple of {CHUNK} rows"
        )
    return rows * ranks


def sharded_rows(op: str, setting: str, rows_axis: int | None, axis_name: AxisName | None) -> bool:
    """Whether `gather_axis` or `scatter_axis` says that rows are sharded over `axis_name` too.

    Raises:
        ValueError: If it names another axis than that of rows, or there is no mesh axis.
    """
    if rows_axis not in (None, 0) or (rows_axis == 0 and axis_name is None):
        raise ValueError(
            f"{op} got {setting}={rows_axis} with axis_name={axis_name!r}: rows are axis 0, sharded over a named mesh"
            " axis"
        )
    return rows_axis == 0


def check_pieces(op: str, size: int, what: str, axis_name: AxisName) -> None:
    """Refuses an axis of `size` that ranks cannot cut into equal pieces.

    Raises:
        ShardingError: If there would be a rest.
    """
    ranks = axis_size(axis_name)
    if size % ranks:
        raise ShardingError(
            f"{op} leaves each rank its piece of {size} {what}, which do not divide over {axis_name}={ranks}:"
            f" pad them to {-(-size // ranks) * ranks}"
        )
