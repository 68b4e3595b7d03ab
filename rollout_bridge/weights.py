"""Rollout weights: exchanged whole or not at all, by name, under a version that changes last.

Rollout weights are the trainer's float32 parameters with every matrix rounded once to the compute dtype by the
`cast` op, which is the rounding that the trainer's ops apply themselves. Vectors (norm scales, convolutions, gates)
stay float32 and are shared, not copied.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isojax.errors import WeightsError
from pallas_kernels.binding import Ops
from qwen35_moe.config import Config
from qwen35_moe.model import param_shapes, rollout_params
from rollout_bridge.device import on_device

type Params = Mapping[str, Any]

_updates = 0


def updates() -> int:
    """How often weights of any engine of this process were exchanged."""
    return _updates


def flatten(params: Params, prefix: str = "") -> dict[str, Any]:
    """Parameters by dotted name, such as `layers.0.mixer.out_proj`, sorted by name."""
    flat: dict[str, Any] = {}
    for name in sorted(params, key=str):
        value = params[name]
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    params: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return params


def digests(params: Params) -> dict[str, str]:
    """A fingerprint of the bits of every tensor, by dotted name; equal wherever the tensor lies or is sharded.

    128 bits from integer sums on the device: they tell accidents apart, they do not withstand forgery.
    """
    return {
        name: f"{value.dtype.name}{list(value.shape)}:" + np.asarray(_lanes(jnp.asarray(value))).tobytes().hex()
        for name, value in flatten(params).items()
    }


def total_digest(named: Mapping[str, str]) -> str:
    """SHA-256 over the fingerprints of all tensors."""
    return hashlib.sha256("\n".join(f"{name} {named[name]}" for name in sorted(named)).encode()).hexdigest()


@jax.jit
def _lanes(value: jax.Array) -> jax.Array:
    """Four wrapping sums of mixed words; integer addition has no order, so layouts and devices agree."""
    words = lax.bitcast_convert_type(value, {2: jnp.uint16, 4: jnp.uint32}[value.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(value.shape, jnp.uint32)
    for axis, size in enumerate(value.shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, value.shape, axis)
    seeds = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
    return jnp.stack([jnp.sum(_mix(words ^ _mix(index + jnp.uint32(seed))), dtype=jnp.uint32) for seed in seeds])


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: a bijection of 32-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


class Weights:
    """The weights that an engine generates with, and the updates they go through.

    Attributes:
        version: Number of updates so far; the weights that the engine started with are version 0.
    """

    def __init__(self, config: Config, ops: Ops):
        self.version = 0
        self._rounded = _rounding(config, ops)
        shapes = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            param_shapes(config),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        self._expected = flatten(jax.eval_shape(lambda params: rollout_params(params, config, ops), shapes))
        self._params: dict[str, Any] | None = None
        self._digests: dict[str, str] = {}
        self._asleep: dict[str, Any] | None = None
        self._staged: dict[str, Any] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The weights.

        Raises:
            WeightsError: If there are none, so that nothing is generated from weights that are gone.
        """
        if self._params is None:
            raise WeightsError(
                "the engine has no weights: "
                + (
                    "they sleep, call wake_up(tags=['weights'])"
                    if self._asleep is not None
                    else "sleep(level=2) dropped them, call update_weights with all of them"
                )
            )
        return self._params

    @property
    def awake(self) -> bool:
        return self._params is not None

    @property
    def digests(self) -> dict[str, str]:
        """`digests` of the weights, by name."""
        return dict(self._digests)

    @property
    def digest(self) -> str:
        return total_digest(self._digests)

    def load(self, params: Params) -> int:
        """Takes the first weights, as version 0; returns the bytes that are not shared with `params`."""
        self._commit(self._checked(params))
        given = {value.unsafe_buffer_pointer() for value in flatten(params).values() if isinstance(value, jax.Array)}
        return sum(v.nbytes for v in flatten(self.params).values() if v.unsafe_buffer_pointer() not in given)

    def update(self, params: Params, expected_digests: Mapping[str, str] | None = None) -> int:
        """Exchanges all weights, or none.

        Args:
            params: Every tensor of the model; float32, or already as the rollout keeps it.
            expected_digests: What `digests` of `params` must be, when they come from elsewhere.

        Returns:
            The new version.

        Raises:
            WeightsError: If a tensor is missing, unknown, of another shape or dtype, or has another digest;
                the message names all of them, and weights and version stay what they were.
        """
        if expected_digests is not None and dict(expected_digests) != (found := digests(params)):
            wrong = sorted(n for n in found.keys() | expected_digests if found.get(n) != expected_digests.get(n))
            raise WeightsError(f"weights changed on their way, version stays {self.version}: {listed(wrong)}")
        global _updates
        self._commit(self._checked(params))
        _updates += 1
        self.version += 1
        return self.version

    def start(self) -> None:
        """Opens an update that comes in parts (vLLM's weight-transfer protocol); an unfinished one is dropped."""
        self._staged = {}

    def stage(self, params: Params) -> None:
        """Takes some tensors of an open update.

        Raises:
            WeightsError: If no update is open, or a tensor came before.
        """
        if self._staged is None:
            raise WeightsError("update_weights came without start_weight_update: start one first")
        flat = flatten(params)
        if twice := flat.keys() & self._staged:
            raise WeightsError(f"tensors came twice in one weight update: {listed(sorted(twice))}")
        self._staged |= flat

    def finish(self) -> int:
        """Closes an open update: checks that every tensor came and exchanges all of them.

        Returns:
            The new version.

        Raises:
            WeightsError: As `update`; the update is dropped then.
        """
        if self._staged is None:
            raise WeightsError("finish_weight_update came without start_weight_update: start one first")
        staged, self._staged = self._staged, None
        return self.update(unflatten(staged))

    def sleep(self, level: Literal[1, 2]) -> None:
        """Frees the device: level 1 keeps the weights on the host, level 2 drops them."""
        if level == 1 and self._params is not None:
            self._asleep = jax.device_get(self._params)
        elif level == 2:
            self._asleep = None
        self._params = None

    def wake(self) -> None:
        """Brings weights back from the host, where sleep put them."""
        if self._params is None and self._asleep is not None:
            self._params = on_device(self._asleep)
        self._asleep = None

    def _checked(self, params: Params) -> dict[str, Any]:
        flat = flatten(params)
        problems = [f"{name} is missing" for name in sorted(self._expected.keys() - flat)]
        problems += [f"{name} is unknown" for name in sorted(flat.keys() - self._expected.keys())]
        for name in sorted(flat.keys() & self._expected.keys()):
            value, expected = flat[name], self._expected[name]
            if tuple(value.shape) != expected.shape:
                problems.append(f"{name} has shape {list(value.shape)}, expected {list(expected.shape)}")
            elif value.dtype not in (np.dtype(np.float32), expected.dtype):
                problems.append(f"{name} is {value.dtype}, expected float32 or {expected.dtype}")
        if problems:
            raise WeightsError(f"weights refused, version stays {self.version}: {listed(problems)}")
        arrays = on_device(flat)
        # Vectors, and in float32 everything, keep their memory: shared, not copied.
        return unflatten(arrays | self._rounded(arrays))

    def _commit(self, rollout: dict[str, Any]) -> None:
        self._digests = digests(rollout)
        self._params, self._asleep = rollout, None


@functools.lru_cache(maxsize=8)
def _rounding(config: Config, ops: Ops) -> Callable[[dict[str, Any]], dict[str, Any]]:
    @jax.jit
    def rounded(flat):
        """The parameters that rollouts keep in another dtype, by dotted name."""
        rollout = flatten(rollout_params(unflatten(flat), config, ops))
        return {name: value for name, value in rollout.items() if value.dtype != flat[name].dtype}

    return rounded


def listed(items: list[str], most: int = 12) -> str:
    """Names for a message; how many more there are, if there are many."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
