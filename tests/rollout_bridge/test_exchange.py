"""Trainer and engine that do not compute the same function part before a token is used."""

import dataclasses

import pytest

from isojax.errors import ContractError
from pallas_kernels.binding import bind
from qwen35_moe import Qwen35Moe
from tests.rollout_bridge.engines import OPS, start


def test_one_policy_agrees_with_itself(engine, model):
    assert engine.agree(model) == engine.identity.digest


def test_another_model_numerics_or_op_is_refused(engine, model):
    wider = Qwen35Moe(dataclasses.replace(model.config, rms_norm_eps=1e-5), model.params(), OPS)
    with pytest.raises(ContractError, match="semantic"):
        engine.agree(wider)
    native = Qwen35Moe(model.config, model.params(), bind("native"))
    with pytest.raises(ContractError, match="native"):
        engine.agree(native)
    other = Qwen35Moe(model.config, model.params(), OPS.replace(rms_norm=bind("native").rms_norm))
    with pytest.raises(ContractError, match="rms_norm"):
        engine.agree(other)


def test_a_policy_without_a_contract_gets_no_engine(model):
    unbound = dataclasses.replace(OPS, contract=None)
    with pytest.raises(ContractError, match="no contract"):
        start(Qwen35Moe(model.config, model.params(), unbound))
