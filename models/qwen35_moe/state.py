"""How the state of a Gated DeltaNet layer moves between pages, slots and a step (docs/gated_deltanet.md).

A page holds the float32 state of the last *closed* chunk and the convolution window; a slot holds the rows of the
open chunk, the state at its start as operand, and the window. The step that enters a page writes both there, so that
no step reads a page that vLLM may already have given away.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt

from isojax.layouts import CHUNK
from pallas_kernels.binding import Ops
from qwen35_moe.cache import Slots, read_state, state_shape, write_state
from qwen35_moe.config import Config
from qwen35_moe.context import Context
from qwen35_moe.step import Residency


@dataclasses.dataclass(frozen=True)
class LayerState:
    """One layer's pool of pages, its slots, and its group of pages.

    Attributes:
        pool: Pages, shared with layers of other groups.
        slots: State of the running requests.
        group: The row of `Residency.state_in` and `state_out` that is this layer's.
    """

    pool: UInt[Array, "num_blocks words"]
    slots: Slots
    group: int

    def enter(self, at: Residency, config: Config) -> tuple[Array, Array, Any]:
        """The state, convolution window and slot contents that chunk sequences start from."""
        state, page_window = read_state(self.pool, at.state_in[self.group], config)
        held = jax.tree.map(lambda x: x.at[at.slot].get(mode="clip"), self.slots)
        window = _where(at.fresh, page_window, held.window)
        # At its first token a sequence starts from nothing: its page still holds another's.
        return state, _where(at.start > 0, window, jnp.zeros_like(window)), held.delta

    def leave(self, at: Residency, state: Array, window: Array, delta: Any) -> "LayerState":
        """Stores what chunk sequences end with."""
        slots = jax.tree.map(lambda held, new: held.at[at.slot].set(new, mode="drop"), self.slots, Slots(delta, window))
        pool = write_state(self.pool, at.state_out[self.group], state, window)
        return dataclasses.replace(self, pool=pool, slots=slots)

    def after_decode(self, window: Array, context: Context, config: Config, ops: Ops) -> "LayerState":
        """Closes the chunks that decode rows fill, and carries state into the pages that they enter."""
        decode, at = context.step.decode, context.decode_at
        tokens = self.pool.shape[1] // (2 * config.kv_dim)
        closing = decode.position % CHUNK == CHUNK - 1
        written = decode.valid & (closing | (decode.position % tokens == 0))

        def update(delta):
            state, _ = read_state(self.pool, at.state_in[self.group], config)
            return ops.gdn_close(decode, delta, at.slot, state)

        def keep(delta):
            return jnp.zeros((at.slot.shape[0], *state_shape(config)), jnp.float32), delta

        # Most steps of few requests close no chunk, and then read no state at all.
        state, delta = lax.cond(jnp.any(written), update, keep, self.slots.delta)
        page = jnp.where(written, at.state_out[self.group], self.pool.shape[0])
        slots = dataclasses.replace(self.slots, delta=delta)
        return dataclasses.replace(self, pool=write_state(self.pool, page, state, window), slots=slots)


def _where(condition, chosen, other):
    return jnp.where(condition.reshape(-1, *(1,) * (chosen.ndim - 1)), chosen, other)
