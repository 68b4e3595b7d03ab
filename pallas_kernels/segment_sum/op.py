"""The order of every sum over the rows of a batch."""

from jaxtyping import Array, Float

from isojax.layouts import Segments
from pallas_kernels.segment_sum import kernel
from pallas_kernels.segment_sum.kernel import Schedule


def segment_sum(
    partials: Float[Array, "blocks *shape"], segments: Segments, *, schedule: Schedule = Schedule()
) -> Float[Array, "*shape"]:
    """Sums one partial per 64-row block: a chain in each sequence, a tree over sequences.

    The bits depend on the sequences alone: an aligned power-of-two run of sequences summed
    elsewhere is a subtree, and absent sequences count as zero.

    Args:
        partials: One term per 64-row block, in row order.
        segments: The sequence of each block.
        schedule: How the work is cut into blocks.

    Returns:
        The sum, added in float32 and rounded once to the dtype of `partials`.

    Raises:
        ValueError: If `partials` and `segments` disagree on the number of blocks.
    """
    blocks = segments.sequence.shape[0]
    if partials.shape[0] != blocks:
        raise ValueError(
            f"segment_sum got {partials.shape[0]} partials for {blocks} blocks of rows:"
            " pass the segments of the batch that the partials came from"
        )
    total = kernel.segment_sum(partials.reshape(blocks, -1), segments, schedule)
    return total.reshape(partials.shape[1:])
