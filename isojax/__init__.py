"""Rollout engine and trainer that compute one floating-point function, bit for bit.

Names are loaded when they are first used: `import isojax` loads no model, no vLLM and no command line.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isojax import optim as optim
    from isojax import rl as rl
    from isojax.audit import audit as audit
    from isojax.bits import compare_bits as compare_bits
    from isojax.bits import digest as digest
    from isojax.errors import AuditError as AuditError
    from isojax.errors import ExecutorError as ExecutorError
    from isojax.errors import IsojaxError as IsojaxError
    from isojax.errors import MismatchError as MismatchError
    from isojax.errors import SamplingError as SamplingError
    from isojax.errors import ShardingError as ShardingError
    from isojax.errors import WeightsError as WeightsError
    from isojax.models import from_pretrained as from_pretrained
    from isojax.scoring import logprobs as logprobs
    from pallas_kernels import collectives as collectives
    from pallas_kernels import ops as ops

_MODULES = {name: f"isojax.{name}" for name in ("audit", "optim", "rl")} | {
    name: f"pallas_kernels.{name}" for name in ("collectives", "ops")
}
_NAMES = {
    "compare_bits": "isojax.bits",
    "digest": "isojax.bits",
    "from_pretrained": "isojax.models",
    "logprobs": "isojax.scoring",
} | {
    name: "isojax.errors"
    for name in (
        "AuditError",
        "ExecutorError",
        "IsojaxError",
        "MismatchError",
        "SamplingError",
        "ShardingError",
        "WeightsError",
    )
}

__all__ = sorted([*_MODULES, *_NAMES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'isojax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
