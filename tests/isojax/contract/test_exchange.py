"""Two programs of one contract find each other equal; with any difference they refuse each other."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from isojax.contract import Identity, Probe, exchange, load
from isojax.errors import ContractError
from tests.isojax.contract.small import PROBES, SMALL, identity, sum_args, sum_of_one

GONE = """
[ops.gone]
computes = "nothing any more"
phases = ["decode"]
probe = { blocks = 2, width = 128 }
[ops.gone.regions.attention]
sums = "nothing"
rounds_to = "compute"
"""


def test_two_processes_of_one_contract_share_an_identity(small, mine):
    assert exchange(mine, identity(small)) == mine.digest
    assert exchange(mine, mine.to_json()) == mine.digest


def test_two_identities_that_differ_in_a_program_refuse_each_other(small, mine):
    reversed_sum = Probe(lambda partials: sum_of_one(partials[::-1]), sum_args)
    with pytest.raises(ContractError, match=r"numerical_policy differs at segment_sum program: rollout \w{12}, update"):
        exchange(mine, identity(small, PROBES | {"segment_sum": reversed_sum}), sides=("rollout", "update"))


def test_identities_that_differ_in_a_gradient_alone_refuse_each_other(small, mine):
    @jax.custom_vjp
    def careless_sum(partials):
        return sum_of_one(partials)

    careless_sum.defvjp(lambda p: (sum_of_one(p), p), lambda p, g: (jnp.broadcast_to(-g, p.shape),))
    with pytest.raises(ContractError, match="differs at segment_sum"):
        exchange(mine, identity(small, PROBES | {"segment_sum": Probe(careless_sum, sum_args)}))


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"compute_dtype": "float32"}, "semantic differs at compute_dtype: trainer bfloat16, engine float32"),
        ({"model": {"eps": 1e-5}}, "semantic differs at model"),
    ],
)
def test_one_sided_settings_refuse_each_other(small, mine, settings, where):
    with pytest.raises(ContractError, match=where):
        exchange(mine, identity(small, **settings))


def test_other_words_for_an_order_refuse_each_other(mine, write):
    other = load(write(SMALL.replace('["isojax.trees.chain", "isojax.trees.fold"]', '["isojax.trees.chain"]')))
    with pytest.raises(ContractError, match="numerical_policy differs at segment_sum"):
        exchange(mine, identity(other))


def test_exact_and_native_refuse_each_other():
    native = identity(load("native"), {})
    assert exchange(native, native.to_json()) == native.digest
    posing = dataclasses.replace(native, policy_parts=dict(native.policy_parts) | {"mode": "exact"})
    with pytest.raises(ContractError, match="differs at mode: trainer exact, engine native"):
        exchange(posing, native)


def test_another_deployment_is_refused_with_the_field(mine):
    old = dataclasses.replace(mine, deployment_parts=dict(mine.deployment_parts) | {"jaxlib": "0.4.1"})
    with pytest.raises(ContractError, match=r"deployment differs at jaxlib: trainer [\d.]+, engine 0\.4\.1"):
        exchange(mine, old)
    less = {name: value for name, value in mine.deployment_parts.items() if name != "device_kind"}
    with pytest.raises(ContractError, match="at device_kind: trainer cpu, engine absent"):
        exchange(mine, dataclasses.replace(mine, deployment_parts=less))
    more = dict(mine.deployment_parts) | {"--xla_backend_optimization_level": "0"}
    with pytest.raises(ContractError, match="at --xla_backend_optimization_level: trainer absent, engine 0"):
        exchange(mine, dataclasses.replace(mine, deployment_parts=more))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda plain: None, "sent no identity"),
        (lambda plain: "CLEAN", "the peer sent str"),
        (lambda plain: {k: v for k, v in plain.items() if k != "deployment"}, "the peer sent contract, digest, num"),
        (lambda plain: plain | {"semantic": {}}, "empty"),
        (lambda plain: plain | {"semantic": {"model": None}}, "parts in words"),
        (lambda plain: plain | {"digest": "0" * 64}, "cut or changed on the way"),
    ],
)
def test_an_absent_or_spoiled_identity_is_refused(mine, spoil, why):
    with pytest.raises(ContractError, match=why):
        exchange(mine, spoil(mine.to_json()))


def test_an_identity_needs_a_probe_for_every_op_and_for_no_other(small):
    with pytest.raises(ContractError, match="without a probe segment_sum; probes of no op swiglu"):
        identity(small, {"rms_norm": PROBES["rms_norm"], "swiglu": PROBES["rms_norm"]})
    with pytest.raises(ContractError, match="needs the size 'rows'"):
        identity(small, PROBES | {"segment_sum": PROBES["rms_norm"]})


def test_programs_and_document_must_name_the_same_regions(small, write):
    undocumented = load(write(SMALL.replace('regions."rms_norm.backward"', 'regions."norm.gradient"')))
    with pytest.raises(ContractError, match=r"says nothing about rms_norm\.backward"):
        identity(undocumented)
    gone = load(write(SMALL.replace("[ops.segment_sum]", GONE + "[ops.segment_sum]")))
    idle = Probe(lambda partials: partials[0], sum_args)
    with pytest.raises(ContractError, match=r"no program of contract small runs attention"):
        identity(gone, PROBES | {"gone": idle})


def test_an_identity_survives_json(mine):
    assert Identity.from_json(mine.to_json()) == mine
