"""The engine as the training loop sees it."""

import pytest

from rollout_bridge.rollouts import Rollouts
from tests.rollout_bridge.engines import MAX_LEN, NUM_BLOCKS, assert_trainer_agrees, policy, prompts

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
