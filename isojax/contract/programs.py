"""Fingerprints of what programs compute.

`str(jaxpr)` does not print index maps, captured constants or a custom gradient, so programs are
serialised structurally: primitives and parameters, kernel bodies, grids, index
maps, constants with their bytes. Variables are numbered in order of appearance; paths, lines and names of
functions do not enter. Of a platform switch only the branch of one platform enters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import Jaxpr, JaxprEqn, Literal, Tracer, Var

from isojax import jaxprs
from isojax.contract.canonical import JSON, array, aval, canonical, sha256
from isojax.errors import ContractError

_SILENT = {
    # Names and hints that change no bit; a region's name does count.
    ("jit", "name"),
    ("jit", "keep_unused"),
    ("jit", "inline"),
    ("jit", "donated_invars"),
    ("jit", "ctx_mesh"),
    ("remat2", "policy"),  # What is kept shows in the gradient program.
    ("remat2", "prevent_cse"),
    ("custom_vmap_call", "rule"),
    ("pallas_call", "debug"),
    ("pallas_call", "cost_estimate"),
    ("pallas_call", "metadata"),
    ("mpmd_map", "debug"),
    ("mpmd_map", "cost_estimate"),
    ("mpmd_map", "metadata"),
}


def program_digest(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> str:
    """SHA-256 of the program of `fn` at the shapes and dtypes of `args`.

    A custom gradient inside counts too, its forward and its backward program.

    Args:
        fn: The function, jitted or not.
        *args: Arrays or `jax.ShapeDtypeStruct`s.
        platform: Whose branch of a platform switch; by default that of the default backend.

    Raises:
        ContractError: If something in the program has no canonical form.
    """
    return sha256(program(fn, *args, platform=platform))


def gradient_digest(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> str:
    """`program_digest` of the gradient of `fn`: cotangents of its outputs in, of its float arguments out."""
    return program_digest(*gradient_program(fn, *args), platform=platform)


def program(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> JSON:
    """What `program_digest` hashes, as plain JSON, for looking at a difference."""
    return serialised(jaxprs.trace(fn, *args, platform=platform), platform)


def serialised(jaxpr: Jaxpr, platform: str | None = None) -> JSON:
    """`program` of what was traced already."""
    return _Writer(jaxprs.platform_name(platform)).jaxpr(jaxpr)


def gradient_program(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any, Any]:
    """The vector-Jacobian product of `fn`, with arguments to trace it at.

    Returns:
        A function of the arguments' leaves and of cotangents, and both as shapes.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [_spec(leaf) for leaf in leaves]
    floats = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def outputs(leaves, values):
        full = list(leaves)
        for i, value in zip(floats, values, strict=True):
            full[i] = value
        return [out for out in jax.tree.leaves(fn(*jax.tree.unflatten(tree, full))) if _is_float(out)]

    def pull(leaves, cotangents):
        _, vjp = jax.vjp(lambda values: outputs(leaves, values), [leaves[i] for i in floats])
        return vjp(cotangents)

    cotangents = [_spec(out) for out in jax.eval_shape(outputs, leaves, [leaves[i] for i in floats])]
    return pull, leaves, cotangents


class _Writer:
    def __init__(self, platform: str, *, derivatives: bool = True):
        self.platform = platform
        self.derivatives = derivatives  # Off inside a derivative: gradients of gradients are promised nowhere.

    def jaxpr(self, jaxpr: Jaxpr) -> JSON:
        names: dict[Var, int] = {}

        def define(variable: Var) -> JSON:
            names[variable] = len(names)
            return aval(variable.aval, "a variable", self.jaxpr)

        def read(atom: Var | Literal) -> JSON:
            return array(np.asarray(atom.val, jaxprs.dtype(atom))) if isinstance(atom, Literal) else names[atom]

        # A scope inside a Mosaic kernel captures references, which its equation also has as operands.
        constants = [
            [define(v), "operand" if isinstance(c, Tracer) else array(c)]
            for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True)
        ]
        inputs = [define(v) for v in jaxpr.invars]
        equations = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "platform_index":
                continue  # The index of a platform switch: the switch itself says which branch.
            chosen = jaxprs.branch_of(eqn, self.platform)
            if chosen is None:
                atoms, body = eqn.invars, [eqn.primitive.name, self.parameters(eqn)]
            elif chosen >= 0:
                atoms, body = eqn.invars[1:], ["platform_switch", self.jaxpr(eqn.params["branches"][chosen])]
            else:
                raise ContractError(
                    f"{':'.join(map(str, jaxprs.source(eqn)))} has no branch for {self.platform},"
                    f" only for {eqn.params['branches_platforms']}: run where it has one"
                )
            equations.append([*body, [read(a) for a in atoms], [define(v) for v in eqn.outvars]])
        return {"constants": constants, "in": inputs, "do": equations, "out": [read(a) for a in jaxpr.outvars]}

    def parameters(self, eqn: JaxprEqn) -> JSON:
        name = eqn.primitive.name
        if name in ("custom_vjp_call", "custom_jvp_call"):
            call = {"call": self.jaxpr(eqn.params["call_jaxpr"])}
            return call | {"derivative": self.derivative(eqn)} if self.derivatives else call
        return {
            key: canonical(value, f"{name}.{key}", self.jaxpr)
            for key, value in eqn.params.items()
            if (name, key) not in _SILENT
        }

    def derivative(self, eqn: JaxprEqn) -> JSON:
        """The custom gradient of `eqn`: its forward and backward programs, as JAX derives them."""
        consts = [_spec(atom.aval) for atom in eqn.invars[: eqn.params["num_consts"]]]
        args = [_spec(atom.aval) for atom in eqn.invars[eqn.params["num_consts"] :]]

        def bind(consts, *args):
            return eqn.primitive.bind(*consts, *args, **eqn.primitive.get_bind_params(eqn.params))

        def pull(consts, leaves, cotangents):
            return gradient_program(lambda *args: bind(consts, *args), *leaves)[0](leaves, cotangents)

        cotangents = [_spec(v.aval) for v in eqn.outvars if _is_float(v.aval)]
        try:
            traced = jaxprs.trace(pull, consts, args, cotangents, platform=self.platform)
        except (TypeError, ValueError) as error:  # The op refuses to be differentiated, which is a fact about it too.
            return {"refused": type(error).__name__}
        return _Writer(self.platform, derivatives=False).jaxpr(traced)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(_spec(value).dtype, jnp.inexact)


def _spec(value: Any) -> jax.ShapeDtypeStruct:
    aval = value if hasattr(value, "dtype") else jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
