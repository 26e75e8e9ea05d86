"""The wheel holds what it should and works where the repository is not.

Builds it from a copy of the tree, once with the core compiled and once without, installs it into a new venv in a
temporary folder, and runs the command there. Knows the packaging; must not know what a run prints.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from configparser import ConfigParser
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("gpu_backend", "sim", "workloads")
SUFFIX = EXTENSION_SUFFIXES[0]
NOT_COPIED = shutil.ignore_patterns(
    ".*", "results", "build", "dist", "*.egg-info", "__pycache__", f"*{SUFFIX}", f"*{SUFFIX}.txt"
)

# One worker builds the wheel for all of these.
pytestmark = pytest.mark.xdist_group("wheel")

Command = Callable[..., str]


def outside(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints in `cwd`, with an environment that names neither the repository, its venv nor a core."""
    hidden = ("PYTHON", "COV", "VIRTUAL_ENV", "SPECKV_CORE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | variables
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, **variables: str) -> Path:
    """The wheel, built in `folder` from a copy so that no leftover of an earlier build gets into it."""
    shutil.copytree(REPOSITORY, folder / "source", ignore=NOT_COPIED)
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    outside(*command, "--outdir", folder, folder / "source", cwd=folder, **variables)
    (built,) = folder.glob("*.whl")
    return built


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module", params=["compiled", "plain"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the core compiled, and the one that comes about where there is no compiler that works."""
    built = build(tmp_path_factory.mktemp("wheel"), **({} if request.param == "compiled" else {"CC": "/bin/false"}))
    if request.param == "compiled" and is_pure(built):
        pytest.skip("nothing was compiled: there is no C compiler here, or no mypy")
    assert is_pure(built) == (request.param == "plain")
    return built


def is_pure(wheel: Path) -> bool:
    """By its name, which says where it can be installed."""
    return wheel.name.endswith("-py3-none-any.whl")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a program of a new venv that has the wheel, and the running environment's libraries, in an empty folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv, workplace = folder / "venv", folder / "workplace"
    workplace.mkdir()
    outside(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python")
    outside(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    libraries = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (site_packages / "libraries.pth").write_text("\n".join(libraries) + "\n")

    def run(program: str, *arguments: str) -> str:
        return outside(venv / "bin" / program, *arguments, cwd=workplace)

    return run


def test_the_wheel_holds_the_packages_and_the_scenarios_and_nothing_else(wheel: Path) -> None:
    modules = {path.relative_to(REPOSITORY) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")}
    scenarios = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "scenarios").rglob("*.yaml")}
    assert Path("scenarios/quickstart.yaml") in scenarios
    page = {path.relative_to(REPOSITORY) for path in (REPOSITORY / "sim" / "report").iterdir() if path.is_file()}
    assert {path.suffix for path in page} == {".py", ".css", ".js", ".txt"}
    assert content(wheel) == {path.as_posix() for path in modules | scenarios | page} | compiled(wheel)


def compiled(wheel: Path) -> set[str]:
    """What the list in pyproject.toml makes of the core: a library, its record, and a way in for each module."""
    if is_pure(wheel):
        return set()
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["speckv"]["compiled"]
    modules = [path for pattern in patterns for path in REPOSITORY.glob(pattern) if path.name != "__init__.py"]
    assert {path.name for path in modules} >= {"scheduler.py", "engine.py", "ledger.py"}
    ways_in = {path.relative_to(REPOSITORY).with_suffix(SUFFIX).as_posix() for path in modules}
    return ways_in | {f"sim/_core__mypyc{SUFFIX}", f"sim/_core__mypyc{SUFFIX}.txt"}


def test_the_core_is_left_out_on_request(tmp_path: Path) -> None:
    built = build(tmp_path, SPECKV_CORE="plain")
    assert is_pure(built)
    assert not [name for name in content(built) if SUFFIX in name]


def test_the_command_says_which_core_runs(wheel: Path, installed: Command) -> None:
    core = "plain (none was compiled for this Python)" if is_pure(wheel) else "compiled"
    assert installed("speckv", "version").splitlines()[1] == f"core: {core}"
    show = "import sim.core.scheduler as module; print(module.__file__)"
    assert installed("python", "-c", show).strip().endswith(".py" if is_pure(wheel) else SUFFIX)


def test_the_wheel_is_speckv_with_one_command(wheel: Path) -> None:
    name, version, *_ = wheel.name.split("-")
    assert (name, version) == ("speckv", "0.2.0.dev0")
    scripts = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        scripts.read_string(archive.read(f"speckv-{version}.dist-info/entry_points.txt").decode())
    assert {section: dict(scripts[section]) for section in scripts.sections()} == {
        "console_scripts": {"speckv": "sim.cli:main"}
    }


def test_it_is_the_wheel_that_is_imported(installed: Command) -> None:
    found = "import sys; from importlib.util import find_spec; print(sys.prefix); "
    found += f"[print(find_spec(name).origin) for name in {PACKAGES}]"
    prefix, *origins = installed("python", "-c", found).splitlines()
    assert len(origins) == len(PACKAGES)
    for origin in origins:
        assert Path(origin).is_relative_to(prefix)
        assert not Path(origin).is_relative_to(REPOSITORY)


def test_it_finds_the_scenarios_that_it_ships(installed: Command) -> None:
    show = "from sim.shipped import shipped_scenarios as s; print((s() / 'quickstart.yaml').read_text(), end='')"
    assert installed("python", "-c", show) == (REPOSITORY / "scenarios" / "quickstart.yaml").read_text()


def test_importing_the_package_loads_no_library(installed: Command) -> None:
    show = "import sim, sys; print(sorted({'numpy', 'pandas', 'pydantic', 'simpy', 'yaml'} & set(sys.modules)))"
    assert installed("python", "-c", show) == "[]\n"


def test_the_command_says_its_version_and_its_help(installed: Command) -> None:
    assert "0.2.0.dev0" in installed("speckv", "--version")
    assert "0.2.0.dev0" in installed("python", "-m", "sim", "--version")
    assert "run" in installed("speckv", "--help")


def test_it_runs_the_quickstart_where_there_is_no_repository(installed: Command) -> None:
    installed("speckv", "run", "quickstart")
    (folder,) = installed("speckv", "run", "quickstart", "--quiet").split()
    assert installed("speckv", "report", folder, "--no-blocks", "-o", "report.html") == "report.html\n"
