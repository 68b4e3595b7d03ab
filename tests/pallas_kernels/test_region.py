import subprocess
import sys

FIRST_PROGRAMS = """
import jax, jax.numpy as jnp
from pallas_kernels.rms_norm import rms_norm

traced = []

@jax.jit
def program(x):
    traced.append(x.shape)
    return rms_norm(x, jnp.zeros(64))

for rows in (8, 16, 8, 16):
    program(jnp.ones((rows, 64)))
print(traced)
"""


def test_the_first_programs_of_a_process_are_traced_once():
    """An engine warms up with its first programs: traced again, they would be compiled while a request waits."""
    done = subprocess.run([sys.executable, "-c", FIRST_PROGRAMS], capture_output=True, text=True, check=True)
    assert done.stdout == "[(8, 64), (16, 64)]\n"
