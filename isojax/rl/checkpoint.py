"""Orbax checkpoints from which a run continues with the bits of an uninterrupted one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from isojax.errors import CheckpointError


class Checkpoints:
    """The checkpoints of one run, as `RUN/step_N`: the state after N updates.

    A checkpoint appears whole or not at all: Orbax writes it elsewhere and renames it.
    """

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(step_prefix="step", enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Updates of the newest checkpoint, if there is one."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, notes: Mapping[str, Any]) -> None:
        """Saves a tree of arrays and a few JSON values, such as the position in the data."""
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(dict(notes)))
        self._manager.save(step, args=arguments, force=True)
        self._manager.wait_until_finished()

    def restore(self, state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The saved tree, in the shapes and shardings of `state`, and the saved JSON values.

        Raises:
            CheckpointError: If there is none, or it holds another tree.
        """
        step = self.latest if step is None else step
        if step is None:
            raise CheckpointError(f"{self._manager.directory} holds no checkpoint to resume from")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore())
        try:
            saved = self._manager.restore(step, args=arguments)
        except (KeyError, ValueError, FileNotFoundError) as error:
            raise CheckpointError(f"{self._manager.directory}/step_{step} is not of this run: {error}") from error
        return jax.tree.map(_placed, state, saved["state"]), saved["notes"]

    def close(self) -> None:
        self._manager.close()


def _placed(like: Any, saved: Any) -> Any:
    """`saved` bound to a device only where `like` is: the run goes on with the programs that it had compiled."""
    bound = not isinstance(like, jax.Array) or like.committed
    return saved if bound else jnp.asarray(np.asarray(saved))


def load_params(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and notes of one checkpoint, `RUN/step_N`, on the host.

    Raises:
        CheckpointError: If there is no such checkpoint.
    """
    path = Path(path).absolute()
    name, _, step = path.name.rpartition("_")
    if name != "step" or not step.isdigit() or not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: name a folder RUN/step_N")
    options = ocp.CheckpointManagerOptions(step_prefix="step", read_only=True)
    with ocp.CheckpointManager(path.parent, options=options) as manager:
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(), notes=ocp.args.JsonRestore())
        saved = manager.restore(int(step), args=arguments)
    return saved["state"]["params"], saved["notes"]
