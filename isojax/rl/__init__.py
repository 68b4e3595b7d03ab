"""GRPO as pure functions: what a rollout engine returned in, a gradient and its proof out."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isojax.rl.advantages import group_advantages as group_advantages
    from isojax.rl.advantages import whiten as whiten
    from isojax.rl.gradient import Scores as Scores
    from isojax.rl.gradient import policy_gradient as policy_gradient
    from isojax.rl.gradient import score as score
    from isojax.rl.losses import TokenFields as TokenFields
    from isojax.rl.losses import grpo_loss as grpo_loss
    from isojax.rl.packing import Batch as Batch
    from isojax.rl.packing import pack as pack
    from isojax.rl.parity import Parity as Parity
    from isojax.rl.parity import check_parity as check_parity
    from isojax.rl.tasks import Jsonl as Jsonl
    from isojax.rl.tasks import ReasoningGym as ReasoningGym
    from isojax.rl.tasks import Task as Task

_MODULE_OF = {
    "group_advantages": "advantages",
    "whiten": "advantages",
    "Scores": "gradient",
    "policy_gradient": "gradient",
    "score": "gradient",
    "TokenFields": "losses",
    "grpo_loss": "losses",
    "Batch": "packing",
    "pack": "packing",
    "Parity": "parity",
    "check_parity": "parity",
    "Jsonl": "tasks",
    "ReasoningGym": "tasks",
    "Task": "tasks",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"isojax.rl.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'isojax.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
