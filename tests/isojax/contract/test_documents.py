"""Documents are read whole or refused whole."""

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from isojax.audit import audit
from isojax.contract import documents as loading
from isojax.contract import load, names
from isojax.errors import ContractError, ShardingError
from pallas_kernels.rms_norm import rms_norm
from tests.isojax.contract.small import SMALL, norm_args

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", names())
def test_shipped_documents_are_valid_and_name_themselves(name):
    assert load(name).name == name


def test_native_computes_the_functions_of_exact_and_promises_nothing():
    exact, native = load("exact").document, load("native").document
    assert native.ops.keys() == exact.ops.keys()
    assert all(op.phases == exact.ops[name].phases for name, op in native.ops.items())
    assert not native.claims
    assert not load("native").regions


def test_documents_are_found_beside_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "isojax"
    (package / "contracts").mkdir(parents=True)
    shutil.copy(ROOT / "contracts" / "exact.toml", package / "contracts")
    installed = loading._candidates(package)
    monkeypatch.setattr(loading, "_candidates", lambda _: installed)
    assert names() == ("exact",)
    assert load("exact").name == "exact"


PROOFS = sorted({proof for proofs in load("exact").proofs().values() for proof in proofs})


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if not proof.startswith("verify:")])
def test_the_tests_that_claims_name_exist(proof):
    path, _, test = proof.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if proof.startswith("verify:")])
def test_the_rows_of_verify_that_claims_name_exist(proof):
    names = {
        node.value
        for path in (ROOT / "isojax" / "verify").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    # A row's name may go on with numbers: `prefix hit of 3 pages`.
    assert any(proof.removeprefix("verify:") in name for name in names if len(name) < 80)


def test_parallelism_without_a_proof_is_refused():
    exact = load("exact")
    exact.refuse_unclaimed(tensor=1, expert=1, data=1, sequence_parallel=False)
    for axis in ("tensor", "expert", "data"):
        with pytest.raises(ShardingError, match=f"{axis}=2 is not claimed by contract exact: use 1"):
            exact.refuse_unclaimed(**{axis: 2})


def test_everything_wrong_in_a_document_is_said_at_once(write):
    text = (
        SMALL.replace('rounds_to = "inputs"', 'rounds_to = "float16"')
        .replace('about = "Two ops"\n', "")
        .replace("row_block = 64", "row_block = 64.5")
        .replace('"isojax.trees.fold"]', '"isojax.trees.knit"]')
        .replace('computes = "a sum"', 'computes = "a sum"\nschedule = 3')
        .replace('"verify:tensor"', '"it was fine"')
    )
    with pytest.raises(ContractError) as error:
        load(write(text))
    for place, why in [
        ("ops.segment_sum.regions.segment_sum.rounds_to", "got 'float16'"),
        ("about", "Field required"),
        ("ops.rms_norm.numerics.row_block", "got 64.5"),
        ("ops.segment_sum.regions.segment_sum.order.1", "got 'isojax.trees.knit'"),
        ("ops.segment_sum.schedule", "Extra inputs"),
        ("claims.0.proofs.0", "got 'it was fine'"),
    ]:
        assert re.search(rf"{re.escape(place)}.*: .*{re.escape(why)}", str(error.value)), place
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('order = ["isojax.trees.chain", "isojax.trees.fold"]', "", "a sum needs an order"),
        ('sums = "squares of a row"', 'sums = "nothing"', "nothing needs none"),
        (', "trainer_backward"]\nnumerics', "]\nnumerics", "trainer_backward is not in phases"),
        ("regions.segment_sum]", "regions.rms_norm]", "region rms_norm belongs to rms_norm and to segment_sum"),
        ('computes = "a sum"', 'computes = "a sum"\nsame_as = "absent"', "is no op with numerics of its own"),
        ('mode = "exact"', 'mode = "native"', "native claims nothing: drop tensor"),
        ("[[claims]]", "[claims]", "valid list"),
        ('phases = ["trainer_backward"]', 'phases = ["training"]', "'prefill', 'decode', 'score'"),
        ("schema_version = 1", "schema_version = 2", "Input should be 1"),
        ("schema_version = 1", "schema_version = ", "is no TOML"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(write, old, new, why):
    assert old in SMALL
    with pytest.raises(ContractError, match=re.escape(why)):
        load(write(SMALL.replace(old, new)))


def test_an_unknown_contract_is_refused_with_the_names_of_the_known(tmp_path):
    with pytest.raises(ContractError, match="use exact, native"):
        load("exakt")
    with pytest.raises(ContractError, match="No such file"):
        load(tmp_path / "none.toml")


def test_numerics_are_one_set_for_all_phases_and_for_ops_of_one_function(small):
    assert small.numerics("rms_norm", "decode") == small.numerics("rms_norm", "trainer_forward") == {"row_block": 64}
    exact = load("exact")
    assert exact.numerics("attention_decode", "decode") == exact.numerics("attention_chunks", "trainer_forward")
    with pytest.raises(ContractError, match="not in 'score'"):
        small.numerics("rms_norm", "score")
    with pytest.raises(ContractError, match="has no op 'norm'"):
        small.numerics("norm", "decode")


def test_a_region_that_the_contract_does_not_know_is_refused(small):
    x, scale = norm_args({"rows": 8, "width": 64}, "float32")
    small.refuse_unknown_regions(audit(rms_norm, x, scale).regions)
    small.refuse_unknown_regions(["rms_norm_backward"])  # As a GPU calls it.
    with pytest.raises(ContractError, match="says nothing about attention, swiglu"):
        small.refuse_unknown_regions(["swiglu", "rms_norm", "attention"])


def test_a_parallelism_that_no_claim_covers_is_refused(small):
    small.refuse_unclaimed(tensor=4)
    with pytest.raises(ShardingError, match=r"tensor=6 is not claimed.*use 1, 2, 4\n.*claims nothing about pipeline"):
        small.refuse_unclaimed(tensor=6, pipeline=2)
    load("native").refuse_unclaimed(tensor=6)


def test_a_document_has_one_digest_and_every_change_of_content_another(write, small):
    assert load(write(SMALL + "\n# A remark.\n")).digest == small.digest
    assert load(write(SMALL.replace("row_block = 64", "row_block = 32"))).digest != small.digest
    assert tomllib.loads(SMALL)["ops"].keys() == small.document.ops.keys()
