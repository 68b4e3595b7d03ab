from pathlib import Path

import pytest

from isojax.contract import load
from tests.isojax.contract.small import SMALL, identity


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "contract.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def small(write):
    return load(write(SMALL))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "small.toml"
    path.write_text(SMALL)
    return identity(load(path))
