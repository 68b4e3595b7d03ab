"""What may stand outside a region, and what to write instead of the rest."""

import numpy as np
from jax._src.core import JaxprEqn, Literal, Var

from isojax.jaxprs import dtype, is_float


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = (
    _words("reshape transpose squeeze expand_dims broadcast_in_dim rev tile copy bitcast_convert_type")
    | _words("slice dynamic_slice dynamic_update_slice gather scatter concatenate pad select_n split stack unstack")
    | _words("iota empty empty2")
    # Nothing at all, for the compiler or for sharding.
    | _words("optimization_barrier stop_gradient name tie dce_sink pvary reduced_vary_cast device_put")
    | _words("sharding_constraint layout_constraint mesh_cast reshard")
    # From device to device.
    | _words("all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute pbroadcast")
    # References outside kernels.
    | _words("get swap")
)
"""Primitives that move floats and never change them. `scatter` is the overwriting one."""

_EXACT_READS = MOVES | _words("eq ne lt le gt ge eq_to le_to lt_to is_finite convert_element_type reduce_or reduce_and")
"""Primitives whose integer results follow from floats without an order or a rounding."""

_SILENT = frozenset({"debug_callback", "debug_print"})
"""Primitives without results that touch no value."""

_ROWWISE = "ops.rowwise, or an op that has it inside"

_USE = {
    "add_any": ("a gradient summed over several readers (add_any)", "ops.fork where the value is read more than once"),
    "psum": ("lax.psum", "collectives.psum, or the op's axis_name"),
    "psum_invariant": ("lax.psum", "collectives.psum, or the op's axis_name"),
    "reduce_scatter": ("reduce_scatter", "ops.row_linear(..., scatter_axis=…), or the op's axis_name"),
    "pmax": ("lax.pmax", "an op with axis_name (ops.logprob)"),
    "pmin": ("lax.pmin", "an op with axis_name"),
    "scatter-add": ("scatter-add", "ops.embed or ops.gather_rows, whose gradients add in token order"),
    "scatter-mul": ("scatter-mul", _ROWWISE),
    "reduce_sum": ("jnp.sum", "ops.tree_sum, or move it out of the gradient"),
    "cumsum": ("jnp.cumsum", _ROWWISE),
    "dot_general": ("dot_general", "ops.column_linear, ops.row_linear or ops.grouped_linear"),
    "ragged_dot_general": ("ragged_dot", "ops.grouped_linear"),
    "conv_general_dilated": ("a convolution", "ops.causal_conv"),
    "convert_element_type": ("a cast", "ops.cast, so that the contract names the rounding"),
    "reduce_precision": ("lax.reduce_precision", "ops.cast, so that the contract names the rounding"),
    "add": ("+", "ops.residual_add or ops.rowwise"),
    "sub": ("-", _ROWWISE),
    "mul": ("*", _ROWWISE),
    "div": ("/", _ROWWISE),
    "neg": ("-", _ROWWISE),
    "sort": ("jnp.sort", "ops.router or ops.sample"),
    "top_k": ("lax.top_k", "ops.router or ops.sample"),
    "argmax": ("jnp.argmax", "ops.sample, whose ties go to the lowest index"),
    "argmin": ("jnp.argmin", "ops.sample, whose ties go to the lowest index"),
    "log_softmax": ("log_softmax", "ops.logprob"),
    "addupdate": ("a sum into a reference", "ops.tree_sum"),
}


def problem(eqn: JaxprEqn, constants: set[Var]) -> tuple[str, str] | None:
    """How to call what `eqn` does outside a region and what to use instead; None if it may stand there.

    Args:
        eqn: An equation that is no region and contains no program to walk into.
        constants: Variables known to be made of literals alone.
    """
    name = eqn.primitive.name
    reads_floats = any(map(is_float, eqn.invars))
    if not eqn.outvars:
        allowed = name in _SILENT
    elif not any(map(is_float, eqn.outvars)):
        allowed = not reads_floats or name in _EXACT_READS
    elif name == "convert_element_type":
        operand, result = eqn.invars[0], eqn.outvars[0]
        # A change of `weak_type` alone is no cast, and a literal has been read by the compiler.
        allowed = dtype(operand) == dtype(result) or is_constant(operand, constants)
    else:
        allowed = name in MOVES
    if allowed:
        return None
    return _USE.get(name, (name, _ROWWISE))


def is_constant(atom: Var | Literal, constants: set[Var]) -> bool:
    """Whether a value is made of literals alone. Captured arrays are not: they may be parameters."""
    return np.ndim(atom.val) == 0 if isinstance(atom, Literal) else atom in constants
