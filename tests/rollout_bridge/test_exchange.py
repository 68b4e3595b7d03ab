"""Trainer and engine that do not compute the same function part before a token is used."""

import dataclasses

import pytest

from isojax.errors import ContractError
from pallas_kernels.binding import bind
from qwen35_moe import Qwen35Moe
from rollout_bridge.exchange import agree
from rollout_bridge.rollouts import Rollouts
from tests.rollout_bridge.engines import MAX_LEN, NUM_BLOCKS, OPS, assert_trainer_agrees, policy, prompts

ENGINE = {
    **{"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "num_gpu_blocks_override": NUM_BLOCKS,
}
SAMPLING = {"n": 2, "max_tokens": 9, "temperature": 0.8, "detokenize": False}


@pytest.fixture(scope="module")
def model():
    return policy()


@pytest.fixture(scope="module")
def rollouts(model):
    engine = Rollouts(model, ENGINE, SAMPLING)
    yield engine
    engine.close()


def test_one_policy_agrees_with_itself(rollouts, model):
    assert agree(rollouts.llm, model) == rollouts.contract_digest == rollouts.llm.contract.digest


def test_another_model_numerics_or_op_is_refused(rollouts, model):
    wider = Qwen35Moe(dataclasses.replace(model.config, rms_norm_eps=1e-5), model.params(), OPS)
    with pytest.raises(ContractError, match="semantic"):
        agree(rollouts.llm, wider)
    native = Qwen35Moe(model.config, model.params(), bind("native"))
    with pytest.raises(ContractError, match="native"):
        agree(rollouts.llm, native)
    other = Qwen35Moe(model.config, model.params(), OPS.replace(rms_norm=bind("native").rms_norm))
    with pytest.raises(ContractError, match="rms_norm"):
        agree(rollouts.llm, other)


def test_a_policy_without_a_contract_gets_no_engine(model):
    unbound = dataclasses.replace(OPS, contract=None)
    with pytest.raises(ContractError, match="no contract"):
        Rollouts(Qwen35Moe(model.config, model.params(), unbound), ENGINE, SAMPLING)


def test_rollouts_depend_on_their_seed_and_not_on_their_order(rollouts, model):
    ids = prompts(20, 30, 40, seed=50)
    forward = rollouts.rollout(ids, [1, 2, 3])
    backward = rollouts.rollout(ids[::-1], [3, 2, 1])
    tokens = [[list(c.token_ids) for c in output.outputs] for output in (*forward, *backward[::-1])]
    assert tokens[:3] == tokens[3:]
    assert_trainer_agrees(model, forward)


def test_the_version_counts_updates(rollouts, model):
    before = rollouts.weights_version
    rollouts.update_weights(model)
    assert rollouts.weights_version == before + 1
