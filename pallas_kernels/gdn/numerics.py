"""What decides the bits of Gated DeltaNet, and what only its speed."""

import dataclasses

from isojax.layouts import CHUNK

MAX_HEAD_DIM = 128
"""A head's products are one chain each (`tile.dot`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Numerics:
    """Decides the bits of the delta rule.

    Attributes:
        form: How a chunk is computed (docs/gated_deltanet.md).
        chunk: Tokens between two states, on the absolute grid of a sequence.

    Raises:
        ValueError: If there is no executor of that form.
    """

    form: str = "incremental_chunk"
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if (self.form, self.chunk) != ("incremental_chunk", CHUNK):
            raise ValueError(
                f"the delta rule is computed as incremental_chunk in chunks of {CHUNK}, got {self.form} in chunks of"
                f" {self.chunk}: name in the contract what both programs have"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """May change the speed of the delta rule, never its bits.

    Attributes:
        key_heads: Key heads of one program, with their value heads; as many as divide the key heads.
    """

    key_heads: int = 4
