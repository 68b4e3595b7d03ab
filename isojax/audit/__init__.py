"""Proof by reading: a traced program computes floats inside regions only."""

import sys
import types
from typing import Any

from isojax.audit.report import Allow, Finding, Report
from isojax.audit.target import Target, load_target
from isojax.audit.walk import audit, dtype_signature

__all__ = ["Allow", "Finding", "Report", "Target", "audit", "dtype_signature", "load_target"]


class _Callable(types.ModuleType):
    """`isojax.audit` is this package and, as the README writes it, the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
