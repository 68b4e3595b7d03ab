import jax
import jax.numpy as jnp

import isojax
from isojax import ops
from tests.bits import assert_bit_equal


@ops.rowwise
def relu2_gate(gate, up):
    return jnp.square(jax.nn.relu(gate)) * up


def test_an_op_of_ones_own_keeps_a_rows_bits_and_passes_the_audit():
    gate, up = (jax.random.normal(jax.random.key(i), (130, 96)) for i in range(2))

    def loss(gate, up):
        return ops.sum_tokens(ops.rms_norm(relu2_gate(gate, up), jnp.zeros(96))[:, 0])

    assert_bit_equal(jax.jit(relu2_gate)(gate[:7], up[:7]), jax.jit(relu2_gate)(gate, up)[:7])
    report = isojax.audit(jax.grad(loss), gate, up)
    assert not report.findings
    assert {"relu2_gate", "relu2_gate.backward"} <= set(report.regions)


def test_every_op_of_the_model_is_offered_with_its_defaults():
    from pallas_kernels.binding import bind

    bound = bind("exact")
    x, w = jnp.ones((8, 64)), jnp.ones((16, 64))
    assert_bit_equal(ops.row_linear(x, w), bound.row_linear(x, w))
    assert set(ops.__all__) >= {
        name for name in vars(type(bound))["__dataclass_fields__"] if callable(getattr(bound, name))
    }
