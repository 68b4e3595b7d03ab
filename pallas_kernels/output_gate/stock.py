"""The native twin: the definition, run by XLA as it is."""

from pallas_kernels.output_gate.reference import output_gate

__all__ = ["output_gate"]
