"""The order of every sum over the rows of a batch."""

from jax import lax
from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.segment_sum import kernel
from pallas_kernels.segment_sum.kernel import Schedule
from pallas_kernels.sharding import AxisName


def segment_sum(
    partials: Float[Array, "blocks *shape"],
    segments: Segments,
    *,
    axis_name: AxisName | None = None,
    schedule: Schedule = Schedule(),
) -> Float[Array, "*shape"]:
    """Sums one partial per 64-row block: a chain in each sequence, a tree over sequences.

    The bits depend on the sequences alone: an aligned power-of-two run of sequences summed
    elsewhere is a subtree, and absent sequences count as zero.

    Args:
        partials: One term per 64-row block, in row order: of all rows, or with `axis_name` of those of this rank.
        segments: The sequence of each block, of all ranks.
        axis_name: The mesh axis that rows are sharded over; every rank gets the sum over all.
        schedule: How the work is cut into blocks.

    Returns:
        The sum, added in float32 and rounded once to the dtype of `partials`.

    Raises:
        ValueError: If `partials` and `segments` disagree on the number of blocks.
    """
    if axis_name is not None:
        partials = lax.all_gather(partials, axis_name, tiled=True)
    blocks = segments.sequence.shape[0]
    if partials.shape[0] != blocks:
        raise ValueError(
            f"segment_sum got {partials.shape[0]} partials for {blocks} blocks of rows:"
            " pass the segments of the batch that the partials came from"
        )
    total = kernel.segment_sum(partials.reshape(blocks, -1), segments, schedule)
    return total.reshape(partials.shape[1:])
