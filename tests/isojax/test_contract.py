"""Documents are read whole or refused whole, and two programs of one contract find each other equal."""

import ast
import dataclasses
import re
import shutil
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from isojax.audit import audit
from isojax.contract import Identity, Probe, deployment_facts, exchange, load, names, refuse_rounding_flags
from isojax.contract import documents as loading
from isojax.contract.flags import shared_flags
from isojax.errors import ContractError, ShardingError
from isojax.layouts import Segments
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.segment_sum import segment_sum

ROOT = Path(__file__).parents[2]

SMALL = """
schema_version = 1
name = "small"
mode = "exact"
about = "Two ops"
families = ["test"]

[ops.rms_norm]
computes = "a norm"
phases = ["prefill", "decode", "trainer_forward", "trainer_backward"]
numerics = { row_block = 64 }
probe = { rows = 64, width = 128 }
[ops.rms_norm.regions.rms_norm]
sums = "squares of a row"
order = ["block"]
rounds_to = "compute"
[ops.rms_norm.regions."rms_norm.backward"]
sums = "products of a row"
order = ["block"]
rounds_to = "compute"
backward = true

[ops.segment_sum]
computes = "a sum"
phases = ["trainer_backward"]
probe = { blocks = 2, width = 128 }
[ops.segment_sum.regions.segment_sum]
sums = "blocks, then sequences"
order = ["isojax.trees.chain", "isojax.trees.fold"]
rounds_to = "inputs"

[[claims]]
name = "tensor"
promise = "no bit changes"
over = { tensor = [1, 2, 4] }
proofs = ["verify:tensor"]
"""


GONE = """
[ops.gone]
computes = "nothing any more"
phases = ["decode"]
probe = { blocks = 2, width = 128 }
[ops.gone.regions.attention]
sums = "nothing"
rounds_to = "compute"
"""


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


def norm_args(sizes, dtype):
    width = sizes["width"]
    return jax.ShapeDtypeStruct((sizes["rows"], width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)


def sum_args(sizes, dtype):
    del dtype
    return (jax.ShapeDtypeStruct((sizes["blocks"], sizes["width"]), jnp.float32),)


def sum_of_one(partials):
    return segment_sum(partials, Segments(jnp.zeros(partials.shape[0], jnp.int32), 1))


PROBES = {"rms_norm": Probe(rms_norm, norm_args), "segment_sum": Probe(sum_of_one, sum_args)}


def identity(contract, probes=PROBES, *, compute_dtype="bfloat16", model=None):
    programs = contract.programs(probes, compute_dtype=compute_dtype)
    return contract.identity(programs, compute_dtype=compute_dtype, model=model or {"eps": 1e-6})


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "small.toml"
    path.write_text(SMALL)
    return identity(load(path))


# Documents.


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


# A contract in use.


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


# Identities.


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


# Flags.


@pytest.mark.parametrize(
    "flag",
    [
        "--xla_cpu_enable_fast_math=true",
        "--xla_cpu_enable_fast_math",
        "--xla_cpu_fast_math_honor_nans=false",
        "--xla_gpu_ftz=1",
        "--xla_disable_hlo_passes=optimization-barrier-expander",
        "--xla_dump_to=/tmp/x --xla_gpu_enable_fast_min_max=true",
    ],
)
def test_flags_that_change_roundings_are_refused(flag, monkeypatch, small):
    with pytest.raises(ContractError, match=flag.split()[-1].split("=")[0]):
        refuse_rounding_flags(flag)
    monkeypatch.setenv("XLA_FLAGS", flag)
    with pytest.raises(ContractError, match="unset in XLA_FLAGS"):
        identity(small)


def test_all_such_flags_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ContractError, match=r"xla_cpu_ftz(.|\n)*xla_gpu_ftz(.|\n)*NVIDIA_TF32_OVERRIDE"):
        refuse_rounding_flags("--xla_cpu_ftz=true --xla_gpu_ftz=true")
    (tmp_path / "flags").write_text("--xla_cpu_ftz=true\n")
    with pytest.raises(ContractError, match="xla_cpu_ftz"):
        refuse_rounding_flags(str(tmp_path / "flags"))


def test_flags_that_change_no_bit_are_not_compared_and_unknown_ones_are():
    refuse_rounding_flags("--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8")
    assert (
        shared_flags("--xla_force_host_platform_device_count=8 --xla_dump_to=x --xla_allow_excess_precision=true") == {}
    )
    assert shared_flags("--xla_some_new_flag=3") == {"xla_some_new_flag": "3"}
    assert shared_flags("--xla_allow_excess_precision=false") == {"xla_allow_excess_precision": "false"}


def test_settings_of_jax_that_decide_bits_are_facts_of_the_deployment():
    facts = deployment_facts()
    with jax.default_matmul_precision("bfloat16"):
        assert deployment_facts() != facts
    assert facts["jax"] == jax.__version__


def test_a_document_has_one_digest_and_every_change_of_content_another(write, small):
    assert load(write(SMALL + "\n# A remark.\n")).digest == small.digest
    assert load(write(SMALL.replace("row_block = 64", "row_block = 32"))).digest != small.digest
    assert tomllib.loads(SMALL)["ops"].keys() == small.document.ops.keys()


def test_an_identity_survives_json(mine):
    assert Identity.from_json(mine.to_json()) == mine
