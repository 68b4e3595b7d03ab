"""What trainer and engine compare before a token is used."""

import dataclasses
import functools
from collections.abc import Mapping

from isojax.contract import Identity
from isojax.errors import ContractError
from isojax.jaxprs import platform_name
from pallas_kernels.binding import Ops, bind
from qwen35_moe.config import Config


def identity(config: Config, ops: Ops, *, platform: str | None = None) -> Identity:
    """The fingerprint of a model that runs `ops`, for `isojax.contract.exchange`.

    Programs are those of the contract that bound `ops`, traced once a process for each compute dtype and
    platform (seconds). If an op is no longer the one that was bound, the identity says so and every peer refuses it.

    Args:
        config: The model's.
        ops: The ops that it runs.
        platform: Whose programs; by default those of the default backend.

    Raises:
        ContractError: If no contract bound `ops`, programs and contract do not fit, or flags can change roundings.
    """
    if ops.contract is None:
        raise ContractError("these ops were bound by no contract, so nothing says what they compute: use ops.bind")
    programs = _programs(bind(ops.contract), config.compute_dtype, platform_name(platform))
    model = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.compare}
    found = ops.contract.identity(programs, compute_dtype=config.compute_dtype, model=model)
    return found.with_replaced(ops.replaced)


@functools.cache
def _programs(ops: Ops, compute_dtype: str, platform: str) -> Mapping[str, str]:
    from pallas_kernels.probes import probes  # Brings the optimiser along, which inference does not need.

    assert ops.contract is not None
    return ops.contract.programs(probes(ops), compute_dtype=compute_dtype, platform=platform)
