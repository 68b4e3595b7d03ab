import jax
import pytest

from isojax.contract import deployment_facts, refuse_rounding_flags
from isojax.contract.flags import shared_flags
from isojax.errors import ContractError
from tests.isojax.contract.small import identity


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
