"""The gradient of a table: one sweep over the rows sorted by word, with one accumulator a sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from isojax import trees
from isojax.layouts import CHUNK, Segments, round_up
from pallas_kernels.region import region_call


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of the gradient of `embed`, never its bits."""

    block: int = 512  # Columns per program, a multiple of 128.


def table_gradient(
    tokens: Int32[Array, " rows"],
    cotangent: Float[Array, "rows width"],
    words: int,
    segments: Segments,
    schedule: Schedule,
) -> Float[Array, "words width"]:
    """Computes `reference.table_gradient` without a scatter: each word gathers the sum of its last row."""
    rows = cotangent.shape[0]
    # A stable sort keeps the rows of a word ascending.
    word, row = lax.sort((tokens, lax.iota(jnp.int32, rows)), num_keys=1, is_stable=True)
    first = jnp.concatenate([jnp.ones(1, bool), word[1:] != word[:-1]])
    sums = _sweep(first, segments.sequence[row // CHUNK], cotangent[row], segments.count, schedule)
    last = jnp.searchsorted(word, lax.iota(jnp.int32, words), side="right").astype(jnp.int32) - 1
    # Words that do not occur find the row of another word, or row -1.
    occurs = (last >= 0) & (word[last] == lax.iota(jnp.int32, words))
    return jnp.where(occurs[:, None], sums[last], jnp.zeros((), jnp.float32))


def _sweep(first, sequence, terms, count: int, schedule: Schedule):
    """For each sorted row the sum of its word's rows so far: a chain in each sequence, a tree over sequences."""
    rows, width = terms.shape
    block = min(schedule.block, round_up(width, 128))
    terms = jnp.pad(terms, ((0, 0), (0, -width % block)))

    def sweep_kernel(
        first_ref,  # [rows]
        sequence_ref,  # [rows]
        terms_ref,  # [rows, block]
        sums_ref,  # [rows, block]
    ):
        def add(i, chains):
            chains = jnp.where(first_ref[i], 0.0, chains)
            index = sequence_ref[i]
            total = lax.dynamic_slice(chains, (index, 0), (1, block)) + terms_ref[pl.ds(i, 1), :].astype(jnp.float32)
            chains = lax.dynamic_update_slice(chains, total, (index, 0))
            sums_ref[pl.ds(i, 1), :] = trees.fold(jnp.add, [chains[s : s + 1] for s in range(count)])
            return chains

        lax.fori_loop(0, rows, add, jnp.zeros((count, block), jnp.float32))

    columns = pl.BlockSpec((rows, block), lambda i: (0, i))
    whole = pl.BlockSpec((rows,), lambda i: (0,))
    return region_call(
        "embed.table_gradient",
        sweep_kernel,
        out_shape=jax.ShapeDtypeStruct(terms.shape, jnp.float32),
        grid=(terms.shape[1] // block,),
        in_specs=[whole, whole, columns],
        out_specs=columns,
    )(first, sequence, terms)[:, :width]
