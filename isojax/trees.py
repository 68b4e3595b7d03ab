"""The orders in which terms meet. Everything isojax adds goes through one of these two functions."""

from collections.abc import Callable, Sequence


def fold[T](add: Callable[[T, T], T], terms: Sequence[T]) -> T:
    """Combines `terms` in tree order: in two, at the largest power of two below their number.

    Every aligned run of a power-of-two length is a subtree, so a shard that holds
    such a run may fold it alone without changing the result.

    Args:
        add: Combines two partial results; need not be associative.
        terms: At least one term, in contract order.

    Raises:
        ValueError: If there are no terms.
    """
    if not terms:
        raise ValueError("fold needs at least one term, got none: pass a zero for an empty sum")
    if len(terms) == 1:
        return terms[0]
    middle = 1 << ((len(terms) - 1).bit_length() - 1)
    return add(fold(add, terms[:middle]), fold(add, terms[middle:]))


def chain[T](add: Callable[[T, T], T], terms: Sequence[T]) -> T:
    """Combines `terms` one after another, from the first.

    A chain may be cut anywhere when its partial result is carried over the cut; it may
    not be split into partial results that are added later.

    Raises:
        ValueError: If there are no terms.
    """
    if not terms:
        raise ValueError("chain needs at least one term, got none: pass a zero for an empty sum")
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total
