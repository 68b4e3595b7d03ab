"""Programs that a command line names: `my_pkg.train:loss_fn`."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from isojax.errors import AuditError


class Target(NamedTuple):
    """A function to audit, with arguments to trace it at."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def load_target(text: str) -> Target:
    """Imports `pkg.mod:fn` and the arguments that `pkg.mod:fn_args` (or `audit_args`) makes for it.

    Raises:
        AuditError: If there is no such module, function or maker of arguments.
    """
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise AuditError(f"audit takes package.module:function, got {text!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise AuditError(f"{text}: {error}: run from the folder that holds it, or install it") from error
    fn: Any = module
    for name in path.split("."):
        fn = getattr(fn, name, None)
    if not callable(fn):
        raise AuditError(f"{text}: {module_name} has no function {path}")
    make = getattr(module, f"{path}_args", None) or getattr(module, "audit_args", None)
    if make is None:
        raise AuditError(
            f"{text} has no arguments to be traced at: define {path}_args() beside it, returning a tuple of arrays or"
            " jax.ShapeDtypeStructs"
        )
    return Target(fn, tuple(make()))
