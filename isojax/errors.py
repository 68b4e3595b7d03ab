"""What isojax raises. A command exits with `exit_code`: 1 when something differs, 2 when it was refused."""


class IsojaxError(Exception):
    """Any error with which isojax stops a run before a token or an update is used."""

    exit_code = 2


class MismatchError(IsojaxError):
    """Bits that were promised equal differ."""

    exit_code = 1


class AuditError(IsojaxError):
    """A traced program computes something outside an op."""

    exit_code = 1


class SamplingError(IsojaxError, ValueError):
    """Rollouts were sampled in a way that scoring was not asked to recompute."""


class ShardingError(IsojaxError, ValueError):
    """A parallelism that the numerics do not divide over."""


class ExecutorError(IsojaxError, NotImplementedError):
    """A region has no executor on the platform that a program is traced for."""


class WeightsError(IsojaxError, ValueError):
    """Weights are unknown, incomplete, or of another version than the samples."""


class ConfigError(IsojaxError, ValueError):
    """A configuration with violations; the message lists all of them."""


class ContractError(IsojaxError, ValueError):
    """A contract document is wrong, or two programs do not keep the same contract."""


class CheckpointError(IsojaxError, ValueError):
    """A checkpoint that is incomplete, cut off, or of another model."""
