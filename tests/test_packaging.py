"""The wheel holds the four packages and the contracts, and imports where nothing else of this tree is."""

import ast
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("isojax", "pallas_kernels", "qwen35_moe", "rollout_bridge")
_SOURCES = dict(zip(_PACKAGES, ("isojax", "pallas_kernels", "models/qwen35_moe", "rollout_bridge"), strict=True))
_HEAVY = ("jax", "torch", "transformers", "vllm", "pallas_kernels", "qwen35_moe", "rollout_bridge", "isojax.cli")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """A Python that sees the wheel and this environment's dependencies, but not this tree."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # Only the folder: Python does not follow the .pth files in it, so the editable install stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


def run(python: Path | str, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-I", "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {*_PACKAGES, "isojax-0.1.0.dist-info"}
    for package, source in _SOURCES.items():
        modules = {path.relative_to(_ROOT / source).as_posix() for path in (_ROOT / source).rglob("*.py")}
        assert {name.removeprefix(f"{package}/") for name in names if name.startswith(f"{package}/")} >= modules


def test_every_contract_document_is_inside_isojax(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    documents = {path.relative_to(_ROOT).as_posix() for path in (_ROOT / "contracts").glob("*.toml")}
    assert documents
    assert {f"isojax/{name}" for name in documents} <= names


@pytest.mark.parametrize("folder", ["models", "contracts"])
def test_a_users_own_folder_of_that_name_does_not_collide(folder):
    assert not (_ROOT / folder / "__init__.py").exists()


def test_the_wheel_imports_without_this_tree(python, tmp_path):
    code = f"import {', '.join(_PACKAGES)}; print(*(m.__file__ for m in ({', '.join(_PACKAGES)})), sep='\\n')"
    for path in run(python, code, tmp_path).split():
        assert Path(path).is_relative_to(python.parents[1])


def test_the_wheel_registers_the_command_and_the_plugins(python, tmp_path):
    code = """
from importlib.metadata import distribution
for entry in distribution("isojax").entry_points:
    assert callable(entry.load())
    print(entry.group, entry.name, entry.value)
"""
    assert set(run(python, code, tmp_path).splitlines()) == {
        "console_scripts isojax isojax.cli:main",
        "vllm.platform_plugins isojax rollout_bridge:register_platform",
        "vllm.general_plugins isojax_models rollout_bridge:register_models",
    }


def test_importing_isojax_loads_no_model_no_engine_and_no_command_line(tmp_path):
    code = f"import isojax, sys; print([m for m in {_HEAVY!r} if m in sys.modules])"
    assert run(sys.executable, code, tmp_path).strip() == "[]"


@pytest.mark.parametrize("package", _PACKAGES)
def test_what_a_package_imports_is_a_declared_dependency(package):
    extras = {"isojax": {"reasoning-gym"}, "rollout_bridge": {"vllm", "torch"}}.get(package, set())  # vLLM needs torch.
    requirements = map(Requirement, metadata.requires("isojax") or ())
    declared = extras | {requirement.name for requirement in requirements if requirement.marker is None}
    distributions = metadata.packages_distributions()
    for path in (_ROOT / _SOURCES[package]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - set(_PACKAGES):
                assert declared & {d.replace("_", "-") for d in distributions[name]}, f"{path} imports {name}"


def test_the_lock_file_agrees_with_what_is_installed():
    lines = (_ROOT / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name: metadata.version(name) for name in locked} == locked
