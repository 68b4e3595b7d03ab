"""One row of a product, alone and among 512: stock JAX gives two answers, isojax one.

python examples/one_row.py
"""

import jax
import numpy as np

from isojax import ops

x = jax.random.normal(jax.random.key(0), (512, 4096))
w = jax.random.normal(jax.random.key(1), (512, 4096))
for name, product in {"jnp.dot": lambda x: x @ w.T, "isojax": lambda x: ops.row_linear(x, w)}.items():
    alone, among = jax.jit(product)(x[:1]), jax.jit(product)(x)[:1]
    different = np.asarray(alone).view(np.uint32) != np.asarray(among).view(np.uint32)
    print(f"{name}: {different.sum()} of {different.size} elements differ")
