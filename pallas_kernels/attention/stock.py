"""The native twins: the reference, which XLA may compute in any order. They promise no bits."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.attention import reference
from pallas_kernels.attention.numerics import Numerics, Schedule
from pallas_kernels.attention.pool import KV
from pallas_kernels.step import Chunks, Decode


def attention_chunks(
    q: Float[Array, "blocks 64 heads width"],
    kv: KV,
    kv_pages: Int32[Array, "sequences pages_per_sequence"],
    chunks: Chunks,
    *,
    scale: float | None = None,
    numerics: Numerics = Numerics(),
    schedule: Schedule = Schedule(),
) -> Float[Array, "blocks 64 heads width"]:
    """`attention_chunks` without its promise: numerics and schedule are ignored, the gradient is autodiff's."""
    del numerics, schedule
    return reference.attention_chunks(q, kv, kv_pages, chunks, scale=scale)


def attention_decode(
    q: Float[Array, "rows heads width"],
    kv: KV,
    kv_pages: Int32[Array, "rows pages_per_sequence"],
    decode: Decode,
    *,
    scale: float | None = None,
    numerics: Numerics = Numerics(),
) -> Float[Array, "rows heads width"]:
    """`attention_decode` without its promise."""
    del numerics
    return reference.attention_decode(q, kv, kv_pages, decode, scale=scale)
