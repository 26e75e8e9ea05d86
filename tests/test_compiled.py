"""Two cores, one meaning: which of them runs, and that their results are the same to the byte.

Knows the command, the files that a run writes, and how the choice is made; must not know what a run's figures mean.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_hash
from pathlib import Path

import pytest

from tests.record_digest import SCENARIOS

REPOSITORY = Path(__file__).resolve().parent.parent
SUFFIX = EXTENSION_SUFFIXES[0]
WHICH = "from sim.compiled import CORE; print(CORE)"


def python(
    *arguments: str, core: str | None, cwd: Path, code: int = 0, path: Path = REPOSITORY, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """What a process of its own says, with SPECKV_CORE set to `core` or not at all, and `path` to import from."""
    environment = {name: value for name, value in os.environ.items() if name != "SPECKV_CORE"}
    environment |= {"PYTHONPATH": str(path)} | ({} if core is None else {"SPECKV_CORE": core})
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, input=given, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


# The same results

SMALL = ("workload.synthetic.num_requests=25",)
STARVED = (*SMALL, "engine.num_gpu_blocks=400", "workload.synthetic.arrivals={process: poisson, rate: 30}")
EAGLE = "engine.speculative_config={method: eagle3, num_speculative_tokens: 3}"
DRAFTER = "engine.speculative_config={method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 3}"
RUNS: dict[str, tuple[str, ...]] = {
    **{name: (name, *overrides) for name, overrides in SCENARIOS.items()},
    "no speculation": ("no-speculation", *SMALL),
    "tree": ("minimal", *SMALL, EAGLE, "engine.policies={undo: compact, tree_widths: [2, 1]}"),
    "article": ("minimal", *SMALL, EAGLE, "engine.preset=article"),
    "vllm-0.24": ("minimal", *STARVED, EAGLE, "engine.preset=vllm-0.24"),
    "sglang": ("minimal", *STARVED, EAGLE, "engine.preset=sglang-0.5.23"),
    "own pool": ("minimal", *STARVED, DRAFTER, "engine.policies.drafter_kv=own_pool_kept"),
    "best by cost": ("minimal", *SMALL, EAGLE, "engine.policies.draft_length=best_by_cost"),
}
TABLES = ("summary.json", "requests.parquet", "steps.parquet")
RUN_THEM = """
import json, sys, sim
alike = ("output.pictures=false", "output.distributions=true")
runs = json.load(sys.stdin)
for name, (scenario, *overrides) in runs.items():
    run = sim.simulate(scenario, (*overrides, *alike), out=name)
    assert not run.found
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each core the folder with all runs in it."""
    said = python("-c", "from sim.compiled import CORE; print(CORE.error or '')", core="compiled", cwd=REPOSITORY)
    if said.stdout.strip():
        pytest.skip(f"there is no compiled core to compare with: {said.stdout.strip()}")
    made = {}
    for core in ("plain", "compiled"):
        made[core] = tmp_path_factory.mktemp(core)
        python("-c", RUN_THEM, core=core, cwd=made[core], given=json.dumps(RUNS))
    return made


@pytest.mark.parametrize("name", RUNS)
def test_both_cores_write_the_same(name: str, folders: dict[str, Path]) -> None:
    written = {}
    for core, folder in folders.items():
        (manifest,) = (folder / name).glob("*/*/manifest.json")
        assert f'"core": "{core}"' in manifest.read_text()
        written[core] = {table: manifest.with_name(table).read_bytes() for table in TABLES}
    assert written["compiled"] == written["plain"]


def test_a_run_of_the_one_core_stands_for_one_of_the_other(folders: dict[str, Path]) -> None:
    scenario, *overrides = RUNS["ngram"]
    given = (*overrides, "output.pictures=false", "output.distributions=true")
    show = f"import sim; print(sim.simulate({scenario!r}, {given}, out='ngram').found)"
    assert python("-c", show, core="compiled", cwd=folders["plain"]).stdout == "True\n"


# The choice, on a tree that says it was compiled


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`sim` without what it needs no core for, with empty files in place of the compiled modules and of the library."""
    root = tmp_path / "tree"
    for name in ("sim/__init__.py", "sim/compiled.py", "sim/records.py", "sim/core/__init__.py", "sim/core/crash.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, root / name)
    lines = ["recipe 0 of-this-test"]
    (root / f"sim/_core__mypyc{SUFFIX}").touch()
    for name in ("sim/records.py", "sim/core/crash.py"):
        lines.append(f"compiled {source_hash((root / name).read_bytes()).hex()} {name}")
        (root / name).with_suffix(SUFFIX).touch()
    (root / f"sim/_core__mypyc{SUFFIX}.txt").write_text("\n".join([*lines, "end - -"]) + "\n")
    return root


def edit(root: Path) -> None:
    with (root / "sim/core/crash.py").open("a") as file:
        file.write("\nEDITED = True\n")


def remove(root: Path) -> None:
    (root / "sim/records.py").with_suffix(SUFFIX).unlink()


def fail(root: Path) -> None:
    (root / f"sim/_core__mypyc{SUFFIX}.txt").write_text("failed - no C compiler that finds Python.h\n")


def none(root: Path) -> None:
    (root / f"sim/_core__mypyc{SUFFIX}.txt").unlink()


def damage(root: Path) -> None:
    (root / f"sim/_core__mypyc{SUFFIX}.txt").write_text("")


def cut(root: Path) -> None:
    """At the end of a line; the sources behind it have changed."""
    record = root / f"sim/_core__mypyc{SUFFIX}.txt"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:3]))


def scramble(root: Path) -> None:
    (root / f"sim/_core__mypyc{SUFFIX}.txt").write_bytes(bytes(range(128, 256)))


def lose(root: Path) -> None:
    (root / f"sim/_core__mypyc{SUFFIX}").unlink()


def checkout(root: Path) -> None:
    (root / "pyproject.toml").touch()
    edit(root)


MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "edited since": (edit, "the compiled core is older than sim/core/crash.py"),
    "edited since in a checkout": (
        checkout,
        "the compiled core is older than sim/core/crash.py; `make compile` builds it again",
    ),
    "a module missing": (remove, "the compiled sim/records.py is missing"),
    "could not be compiled": (fail, "it could not be compiled: no C compiler that finds Python.h"),
    "never compiled": (none, "none was compiled for this Python"),
    "an empty record": (damage, f"{{root}}/sim/_core__mypyc{SUFFIX}.txt is damaged"),
    "a record cut short": (cut, f"{{root}}/sim/_core__mypyc{SUFFIX}.txt is damaged"),
    "a record of no text": (scramble, f"{{root}}/sim/_core__mypyc{SUFFIX}.txt is damaged"),
    "the library missing": (lose, f"{{root}}/sim/_core__mypyc{SUFFIX} is missing"),
}


def test_the_compiled_core_runs_where_it_fits(tree: Path) -> None:
    for core in (None, "", "compiled"):
        assert python("-c", WHICH, core=core, cwd=tree, path=tree).stdout == "compiled\n"
    assert python("-c", WHICH, core="plain", cwd=tree, path=tree).stdout == "plain (SPECKV_CORE=plain)\n"


@pytest.mark.parametrize("case", MISFITS)
def test_the_plain_one_runs_where_it_does_not(case: str, tree: Path) -> None:
    change, reason = MISFITS[case]
    change(tree)
    reason = reason.replace("{root}", str(tree))
    assert python("-c", WHICH, core=None, cwd=tree, path=tree).stdout == f"plain ({reason})\n"
    refused = python("-c", "import sim.records", core="compiled", cwd=tree, path=tree, code=1).stderr
    assert f"ImportError: SPECKV_CORE=compiled: there is no compiled core that fits: {reason}" in refused


def test_the_plain_core_is_never_a_mixture(tree: Path) -> None:
    """What is compiled here is empty, and would not load."""
    edit(tree)
    show = "import sim.records, sim.core.crash; print(sim.records.__file__, sim.core.crash.EDITED)"
    said = python("-c", show, core=None, cwd=tree, path=tree).stdout
    assert said == f"{tree / 'sim' / 'records.py'} True\n"


def test_a_time_of_change_alone_says_nothing(tree: Path) -> None:
    """Installing and cloning set it as they like."""
    os.utime(tree / "sim/records.py", (4e9, 4e9))
    assert python("-c", WHICH, core=None, cwd=tree, path=tree).stdout == "compiled\n"


# A value that means nothing

WRONG = "SPECKV_CORE='fast': no such core; allowed: plain, compiled, or not set"


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("run", "quickstart")])
def test_a_wrong_value_ends_with_2_and_says_what_is_allowed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = python("-m", "sim", *arguments, core="fast", cwd=tmp_path, code=2)
    assert done.stderr == f"speckv: {WRONG}\n"
    assert not list(tmp_path.iterdir())


def test_a_wrong_value_in_a_script(tmp_path: Path) -> None:
    done = python("-c", "import sim; sim.simulate('quickstart')", core="fast", cwd=tmp_path, code=1)
    assert done.stderr.splitlines()[-1] == f"ImportError: {WRONG}"
