"""What every layer of one forward shares."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from isojax.layouts import Segments
from pallas_kernels.norm_rope import rotary_tables
from qwen35_moe.config import Config
from qwen35_moe.step import Residency, Step


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """A step with what its layers look up: rotary tables by row, segments, and where its sequences live."""

    step: Step
    cos: Float32[Array, "rows half"]
    sin: Float32[Array, "rows half"]
    segments: Segments | None
    decode_at: Residency | None
    chunks_at: Residency | None

    @classmethod
    def of(
        cls,
        step: Step,
        config: Config,
        max_positions: int,
        decode_at: Residency | None = None,
        chunks_at: Residency | None = None,
    ) -> "Context":
        """Looks up the rotary tables of `step`, whose positions are below `max_positions`."""
        tables = rotary_tables(max_positions, config.rotary_dim, config.rope_theta)
        cos, sin = (jnp.asarray(table)[step.positions] for table in tables)
        return cls(step, cos, sin, step.segments, decode_at, chunks_at)

    @property
    def kv_pages(self) -> tuple[Int32[Array, "_ pages"] | None, Int32[Array, "_ pages"] | None]:
        """Page tables of the decode rows and of the chunk sequences."""
        return (
            None if self.decode_at is None else self.decode_at.kv_pages,
            None if self.chunks_at is None else self.chunks_at.kv_pages,
        )
