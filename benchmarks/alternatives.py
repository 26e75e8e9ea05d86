"""Ways to make a hot loop fast, measured against each other: what a frame costs in each, by the size of the batch.

    python benchmarks/alternatives.py [--batches 8 32 128 512 2048] [--repeat 5]

The loop is the ledger's when a batch comes back, less what is rare: a request's numbers are read, two compared, five
written, one summed. Each way has the data as it wants it: objects in a list, or columns of which a batch takes some
rows (who runs changes from step to step, so that columns are read and written by row numbers), and a batch that is
there as columns already. `objects` and mypyc run the same text. mypyc and Cython compile when the script runs, numba
when it first calls; what is not installed is left out (`pip install mypy cython numba`). All must give the same sums.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cases import machine

OBJECTS = """
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import i64


class Account:
    __slots__ = ("certain", "computed", "garbage", "written")

    def __init__(self, computed: int) -> None:
        self.computed: i64 = computed
        self.certain: i64 = computed
        self.written: i64 = computed
        self.garbage: i64 = 0


class Frame:
    __slots__ = ("num_rejected", "num_tokens")

    def __init__(self, num_tokens: int, num_rejected: int) -> None:
        self.num_tokens: i64 = num_tokens
        self.num_rejected: i64 = num_rejected


def step(accounts: list[Account], frames: list[Frame]) -> int:
    delta: i64 = 0
    for account, frame in zip(accounts, frames):
        num_tokens = frame.num_tokens
        computed = account.computed + num_tokens
        end = account.certain + num_tokens
        written = account.written
        if end > written:
            account.written = written = end
        rejected = frame.num_rejected
        if rejected:
            computed -= rejected
            end -= rejected
        account.computed = computed
        account.certain = end
        garbage: i64 = 0
        if written > computed:
            garbage = written - computed
        before = account.garbage
        if garbage != before:
            delta += garbage - before
            account.garbage = garbage
    return delta
"""
CYTHON = """
import cython


@cython.cclass
class Account:
    computed: cython.longlong
    certain: cython.longlong
    written: cython.longlong
    garbage: cython.longlong

    def __init__(self, computed):
        self.computed = self.certain = self.written = computed
        self.garbage = 0


@cython.cclass
class Frame:
    num_tokens: cython.longlong
    num_rejected: cython.longlong

    def __init__(self, num_tokens, num_rejected):
        self.num_tokens = num_tokens
        self.num_rejected = num_rejected


@cython.locals(
    account=Account, frame=Frame, delta=cython.longlong, num_tokens=cython.longlong, computed=cython.longlong,
    end=cython.longlong, written=cython.longlong, rejected=cython.longlong, garbage=cython.longlong,
    before=cython.longlong,
)
def step(accounts: list, frames: list):
"""
"""The same body under declarations of its own: without them its attributes are Python's integers."""
ROWS = 4096
"""Requests that there are; a batch takes some of them."""

Step = Callable[[], int]
"""Takes one batch back; returns the change of garbage."""


def numbers(batch: int) -> tuple[list[int], list[int], list[int]]:
    """Rows, tokens and rejections of a batch's frames, the same for every way."""
    draw = np.random.default_rng(batch)
    rows = np.sort(draw.choice(ROWS, batch, replace=False))
    return rows.tolist(), [6] * batch, draw.integers(0, 6, batch).tolist()


def over_objects(module: Any) -> Callable[[int], Step]:
    """Objects in lists, of a module that has been compiled or not."""

    def prepared(batch: int) -> Step:
        rows, tokens, rejected = numbers(batch)
        every = [module.Account(100) for _ in range(ROWS)]
        accounts = [every[row] for row in rows]
        frames = [module.Frame(*frame) for frame in zip(tokens, rejected, strict=True)]
        return lambda: int(module.step(accounts, frames))

    return prepared


def over_numpy(batch: int) -> Step:
    """Columns, a call of NumPy each."""
    at, tokens, rejected = (np.array(column, dtype=np.int64) for column in numbers(batch))
    all_computed, all_certain, all_written = (np.full(ROWS, 100, dtype=np.int64) for _ in range(3))
    all_garbage = np.zeros(ROWS, dtype=np.int64)

    def step() -> int:
        end = all_certain[at] + tokens
        written = np.maximum(all_written[at], end)
        computed = all_computed[at] + tokens - rejected
        garbage = np.maximum(written - computed, 0)
        delta = int((garbage - all_garbage[at]).sum())
        all_written[at] = written
        all_computed[at] = computed
        all_certain[at] = end - rejected
        all_garbage[at] = garbage
        return delta

    return step


def over_numba(numba: Any) -> Callable[[int], Step]:
    """Columns, in a loop that numba compiles."""

    @numba.njit
    def loop(at, tokens, rejected, all_computed, all_certain, all_written, all_garbage):  # type: ignore[no-untyped-def]
        delta = 0
        for number in range(len(at)):
            row = at[number]
            end = all_certain[row] + tokens[number]
            written = max(all_written[row], end)
            computed = all_computed[row] + tokens[number] - rejected[number]
            garbage = max(written - computed, 0)
            delta += garbage - all_garbage[row]
            all_written[row] = written
            all_computed[row] = computed
            all_certain[row] = end - rejected[number]
            all_garbage[row] = garbage
        return delta

    def prepared(batch: int) -> Step:
        at, tokens, rejected = (np.array(column, dtype=np.int64) for column in numbers(batch))
        columns = [np.full(ROWS, 100, dtype=np.int64) for _ in range(3)] + [np.zeros(ROWS, dtype=np.int64)]
        return lambda: int(loop(at, tokens, rejected, *columns))

    return prepared


def compiled(name: str, text: str, folder: Path) -> Any:
    """A module made of this text by mypyc or Cython; raises ImportError where that is not installed."""
    importlib.import_module({"mypyc": "mypyc.build", "cython": "Cython"}[name])
    (folder / f"{name}_loop.py").write_text(text)
    build = {
        "mypyc": f"from mypyc.build import mypycify as made; made = made(['{name}_loop.py'])",
        "cython": f"from Cython.Build import cythonize as made; made = made(['{name}_loop.py'], language_level=3)",
    }[name]
    (folder / "setup.py").write_text(f"from setuptools import setup\n{build}\nsetup(name='{name}', ext_modules=made)\n")
    line = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, env={**os.environ, "CFLAGS": "-O3"})
    if done.returncode:
        raise ImportError(f"does not compile: {done.stderr.strip().splitlines()[-1]}")
    (folder / f"{name}_loop.py").unlink()  # what is imported is the compiled one
    return importlib.import_module(f"{name}_loop")


def ways(folder: Path) -> dict[str, Callable[[int], Step]]:
    """Those that are installed, by name; says why the others are not here."""
    sys.path.insert(0, str(folder))
    (folder / "plain_loop.py").write_text(OBJECTS)
    found = {"objects, plain": over_objects(importlib.import_module("plain_loop")), "columns, NumPy": over_numpy}
    body = OBJECTS.split("-> int:\n", 1)[1].replace("delta: i64", "delta").replace("garbage: i64", "garbage")
    for name, text in (("mypyc", OBJECTS), ("cython", CYTHON + body)):
        try:
            found[f"objects, {name}"] = over_objects(compiled(name, text, folder))
        except ImportError as error:
            print(f"Left out, {name}: {error}")
    try:
        found["columns, numba"] = over_numba(importlib.import_module("numba"))
    except ImportError as error:
        print(f"Left out, numba: {error}")
    return found


def cost_ns(step: Step, batch: int) -> float:
    """Processor time a frame, over about a tenth of a second."""
    calls = max(200_000 // batch, 50)
    began = time.thread_time_ns()
    for _ in range(calls):
        step()
    return (time.thread_time_ns() - began) / calls / batch


def main() -> None:
    """Measure, and print a row a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32, 128, 512, 2048])
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = ways(Path(folder))
        for batch in given.batches:
            sums = {name: [step() for step in [prepared(batch)] for _ in range(3)] for name, prepared in found.items()}
            if len(set(map(tuple, sums.values()))) != 1:
                raise SystemExit(f"they do not agree: {sums}")
        print(f"ns a frame, median of {given.repeat}; {machine()}")
        print("| way | " + " | ".join(f"batch {batch}" for batch in given.batches) + " |")
        print("| --- |" + " --- |" * len(given.batches))
        for name, prepared in found.items():
            costs = []
            for batch in given.batches:
                step = prepared(batch)
                costs.append(statistics.median(cost_ns(step, batch) for _ in range(given.repeat)))
            print(f"| {name} | " + " | ".join(f"{cost:.1f}" for cost in costs) + " |", flush=True)


if __name__ == "__main__":
    main()
