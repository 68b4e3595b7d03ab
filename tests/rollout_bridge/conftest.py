"""The small policy and an engine beside it, once a module."""

import pytest

from tests.rollout_bridge.engines import WORDS, policy, start


@pytest.fixture(scope="module")
def model():
    return policy(tokenizer_size=WORDS)


@pytest.fixture(scope="module")
def policies():
    return policy(0), policy(1)


@pytest.fixture(scope="module")
def engine(model):
    llm = start(model)
    yield llm
    llm.close()
