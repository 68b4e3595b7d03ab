"""The identity of the model under the shipped contract: the same in every process, another for every other number."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isojax import trees
from isojax.contract import Contract, exchange, gradient_digest, load
from isojax.errors import ContractError
from pallas_kernels.binding import Ops, bind
from pallas_kernels.probes import probes
from pallas_kernels.rms_norm import stock
from qwen35_moe import identity
from tests.qwen35_moe.tiny import config, dense_config

ROOT = Path(__file__).parents[3]

IN_ANOTHER_PROCESS = """
import json, sys
from tests.qwen35_moe.tiny import config
from pallas_kernels.binding import bind
from qwen35_moe import identity
json.dump(identity(config("bfloat16"), bind("exact")).to_json(), sys.stdout)
"""


@pytest.fixture(scope="module")
def mine():
    return identity(config("bfloat16"), bind("exact"))


FEW = ("cast", "row_linear", "rms_norm", "segment_sum")


def of_few(contract=None, compute_dtype="bfloat16", platform=None, ops=FEW):
    """An identity of a few ops alone: tracing all takes seconds."""
    contract = contract or load("exact")
    few = Contract(contract.document.model_copy(update={"ops": {op: contract.op(op) for op in ops}}))
    table = {op: probes(bind(contract))[op] for op in ops}
    programs = few.programs(table, compute_dtype=compute_dtype, platform=platform)
    return few.identity(programs, compute_dtype=compute_dtype)


def differing(a, b):
    return {name for name, digest in a.policy_parts.items() if b.policy_parts[name] != digest}


def test_another_process_has_the_same_identity(mine):
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert exchange(mine, json.loads(done.stdout)) == mine.digest


def test_every_op_that_the_contract_names_has_a_program(mine):
    exact = load("exact")
    assert {f"{op} program" for op in exact.document.ops} <= set(mine.policy_parts)
    assert "rms_norm gradient" in mine.policy_parts
    assert "sample gradient" not in mine.policy_parts


def test_other_splits_of_a_sum_are_other_programs(tmp_path):
    path, text = tmp_path / "exact.toml", (ROOT / "contracts" / "exact.toml").read_text()
    settings = "numerics = {{ num_splits = {} }}\nprobe = {{ rows = 128"
    path.write_text(text.replace(settings.format(8), settings.format(4)))
    mine, other = of_few(), of_few(load(path))
    assert differing(mine, other) == {"row_linear", "row_linear program", "row_linear gradient"}
    with pytest.raises(ContractError, match="numerical_policy differs at row_linear: trainer"):
        exchange(mine, other)


@pytest.mark.parametrize("op", ["row_linear", "rms_norm", "attention_chunks"])
def test_a_tree_cut_elsewhere_in_the_code_is_another_program(op, monkeypatch):
    """As where one side has edited `isojax.trees`, of which the document knows nothing."""
    document, fold = load("exact").op(op), trees.fold

    def digest():
        probe = probes(bind("exact"))[op]
        return gradient_digest(probe.fn, *probe.args(document.probe, np.dtype("float32")))

    mine = digest()
    monkeypatch.setattr(trees, "fold", lambda add, terms: fold(add, terms[::-1]))
    assert digest() != mine


def test_compute_dtypes_have_other_programs_and_refuse_each_other():
    mine, other = of_few(), of_few(compute_dtype="float32")
    assert "rms_norm program" in differing(mine, other)
    with pytest.raises(ContractError, match="semantic differs at compute_dtype: trainer bfloat16, engine float32"):
        exchange(mine, other)


def test_models_refuse_each_other(mine):
    other = identity(dense_config("bfloat16"), bind("exact"))
    with pytest.raises(ContractError, match="semantic differs at model"):
        exchange(mine, other)
    assert dict(other.policy_parts) == dict(mine.policy_parts)


def test_platforms_have_other_programs_and_refuse_each_other():
    """Traced for a GPU here; that the device differs too is a part of the deployment."""
    mine, other = (of_few(platform=platform, ops=["residual_add"]) for platform in ("cpu", "cuda"))
    assert differing(mine, other) == {"residual_add program", "residual_add gradient"}
    with pytest.raises(ContractError, match="numerical_policy differs at residual_add program"):
        exchange(mine, other)


# What runs is what the contract bound.


@pytest.mark.parametrize("change", [Ops.replace, dataclasses.replace])
@pytest.mark.parametrize("sides", [("mine", "other"), ("other", "mine"), ("other", "other")])
def test_a_replaced_op_is_refused_by_name_on_either_side(mine, change, sides):
    ops = change(bind("exact"), rms_norm=stock.rms_norm, fork=lambda x, n: (x,) * n)
    other = identity(config("bfloat16"), ops)
    side = ("trainer", "engine")[sides.index("other")]
    first, second = ({"mine": mine, "other": other}[name] for name in sides)
    with pytest.raises(ContractError, match=f"{side} does not run the ops of contract exact: fork, rms_norm replaced"):
        exchange(first, second.to_json())
    assert other.digest != mine.digest


def test_an_op_put_back_is_no_replacement(mine):
    ops = bind("exact")
    again = ops.replace(rms_norm=stock.rms_norm).replace(rms_norm=ops.rms_norm)
    assert exchange(mine, identity(config("bfloat16"), again)) == mine.digest


def test_ops_of_no_contract_have_no_identity():
    ops = dataclasses.replace(bind("exact"), contract=None)
    with pytest.raises(ContractError, match="bound by no contract"):
        identity(config(), ops)


def test_native_ops_keep_the_native_contract_and_are_no_exact_ones(mine):
    native = identity(config("bfloat16"), bind("native"))
    assert exchange(native, native.to_json()) == native.digest
    with pytest.raises(ContractError, match="differs at mode: trainer exact, engine native"):
        exchange(mine, native)


def test_ops_are_traced_once_for_a_contract_dtype_and_platform(mine, monkeypatch):
    monkeypatch.setattr(Contract, "programs", lambda *args, **settings: pytest.fail("traced again"))
    assert identity(config("bfloat16"), bind(load("exact"))).digest == mine.digest
