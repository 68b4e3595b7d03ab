from pallas_kernels.output_gate.op import output_gate

__all__ = ["output_gate"]
