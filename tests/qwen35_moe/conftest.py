import pytest

from tests.qwen35_moe.checkpoints import release


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    return release(tmp_path_factory.mktemp("released") / "model")
