import subprocess
import sys

import isojax
from isojax import rl


def test_importing_isojax_loads_no_jax_no_model_and_no_engine():
    code = (
        "import sys, isojax, isojax.rl\n"
        "heavy = {'jax', 'flax', 'torch', 'vllm', 'typer', 'qwen35_moe', 'pallas_kernels'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there_when_it_is_asked_for():
    for module in (isojax, rl):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        assert dir(module) == module.__all__


def test_audit_is_a_function_as_the_readme_calls_it():
    assert callable(isojax.audit)
    assert isojax.MismatchError.exit_code == 1
    assert isojax.WeightsError.exit_code == 2
