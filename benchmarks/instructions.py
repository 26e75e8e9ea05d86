"""Instructions of a small run, held against those that were last agreed on: a check of speed that no load disturbs.

    python benchmarks/instructions.py [--update]      # or: make instructions

200 requests through scheduler, device, engine, ledger, metrics and recorder, by core:

- plain: instructions of Python's bytecode, everything interpreted counted. The same in every process of one Python
  minor version; says nothing of what C code does for one of them.
- compiled: instructions of the processor, by valgrind's callgrind, within `Engine.run`. NumPy's are left out, since it
  chooses its loops by processor. Where there is no valgrind or no compiled core this is not counted, and it says so.

Ends with 1 where a count has grown by more than 10 percent. `--update` writes what it finds into `instructions.json`,
to be committed with a word on why. A Python or a compiler that has no count there is told so, and passes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
BASELINES = Path(__file__).resolve().with_name("instructions.json")
ALLOWED_GROWTH = 0.10
NUM_REQUESTS = 200
ENTRY = "CPyDef_engine___Engine___run"
"""What mypyc calls the compiled `Engine.run`."""
_NOT_OURS = re.compile(r"numpy|/libm[.-]|/libopenblas")


class Requests:
    """A hundred requests a second, each with 512 prompt and 128 output tokens of its own."""

    def __init__(self, count: int) -> None:
        self.num_requests: int | None = count

    def arrivals(self) -> Iterator[Any]:
        """All of them, in order."""
        from workloads.spec import RequestSpec, prompt_stream

        for index in range(self.num_requests or 0):
            yield RequestSpec(index, index * 10_000_000, ((prompt_stream(index), 0, 512),), 512, 128, 0)

    def after(self, spec: object, finish_ns: int) -> Sequence[Any]:
        """None sets off another."""
        return ()


class TenMilliseconds:
    """The time of every step."""

    def step_cost(self, step: object) -> Any:
        """As a timing model says it."""
        from sim.models.timing import NO_COST

        return NO_COST._replace(overhead=10_000_000)


def small_run(folder: Path, num_requests: int = NUM_REQUESTS) -> Any:
    """An engine that is ready to run: EAGLE-3, K = 5, async, observed as `speckv run` does it.

    Put together by hand, since under valgrind a scenario takes longer to be read than this takes to run.
    """
    from sim.content import SegmentContent
    from sim.core.scheduler import Scheduler
    from sim.core.settings import Settings
    from sim.device import Device
    from sim.engine import Engine
    from sim.models.acceptance import Geometric
    from sim.observers.ledger import Ledger
    from sim.observers.metrics import Metrics
    from sim.observers.recorder import Recorder
    from sim.policies.drafters import DRAFTERS
    from sim.policies.presets import DEFAULT_PRESET, PRESETS

    k = 5
    drafter = DRAFTERS["eagle3"]
    rules = PRESETS[DEFAULT_PRESET]
    settings = Settings(
        num_gpu_blocks=4000,
        num_speculative_tokens=k,
        num_lookahead_tokens=drafter.num_lookahead_tokens(k),
        draft_slots=drafter.draft_slots,
        drop_last_hit_block=drafter.drop_last_hit_block,
    )
    engine = Engine(
        Scheduler(settings, rules),
        Device(TenMilliseconds(), Geometric(0, 0.65), None, None, None),
        Requests(num_requests),
        lambda spec: SegmentContent(spec.index, spec.prompt, spec.num_prompt_tokens, settings.block_size),
        async_scheduling=True,
        schedule_ns=0,
        update_ns=0,
        max_request_tokens=60_000,
        max_prompt_tokens=60_000,
    )
    ledger = Ledger(settings.num_gpu_blocks, settings.block_size, lossy=rules.stale_output.frames_count)
    recorder = Recorder(folder, ledger, engine.scheduler)
    for observer in (ledger, recorder, Metrics(recorder.request_row, num_speculative_tokens=k)):
        engine.add_observer(observer)
    return engine


def bytecodes(run: Callable[[], object]) -> int:
    """Instructions of Python's bytecode that are executed while this runs."""
    count = 0

    def on_instruction(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return on_instruction

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return on_instruction

    before = sys.gettrace()
    collects = gc.isenabled()
    gc.disable()  # what is left over from before has finalisers of its own
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def counted_by_object(lines: Iterable[str]) -> Counter[str]:
    """Of a file that callgrind has written: instructions by the library or program that executed them."""
    names: dict[str, str] = {}
    found: Counter[str] = Counter()
    here = ""
    of_a_call = False
    for line in lines:
        if line.startswith(("ob=", "cob=")):
            number, _, name = line.partition("=")[2].rstrip().partition(" ")
            names.setdefault(number, name)
            if line[0] == "o":
                here = names[number]
        elif line.startswith("calls="):
            of_a_call = True  # The next line has what the call cost, which stands with its own object as well.
        elif line[0] in "+-*0123456789" and not of_a_call:
            found[here] += int(line.split()[1])
        else:
            of_a_call = False
    return found


def ours(counted: Counter[str]) -> int:
    """Those of the core, of Python and of the C library."""
    return sum(count for name, count in counted.items() if not _NOT_OURS.search(name))


def key(core: str) -> str:
    """What a count depends on, beside the sources."""
    python = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    if core == "plain":
        return f"plain, {python}"
    return f"compiled, {python} by {platform.python_compiler()}, {platform.machine()}"


def verdict(key: str, found: float, agreed: float | None) -> tuple[str, bool]:
    """A line on a count, in instructions a request-step, and whether it is all right."""
    if agreed is None:
        return f"{key}: {found:,.1f} a request-step; NOT HELD: none agreed on for these (--update adds it)", True
    growth = found / agreed - 1
    line = f"{key}: {found:,.1f} a request-step, {growth:+.1%} on the {agreed:,.1f} agreed on"
    if found > agreed * (1 + ALLOWED_GROWTH):
        accept = "If it is worth it: python benchmarks/instructions.py --update, and commit instructions.json."
        return f"{line}: MORE THAN {ALLOWED_GROWTH:.0%}. {accept}", False
    if growth < -ALLOWED_GROWTH:
        line += "; keep it so: --update"
    return line, True


def count(core: str, before: str = "") -> float | str:
    """Instructions a request-step on a core, in a process of its own, or why they cannot be counted.

    `before`: Python that is executed there first; for tests.
    """
    from cases import environment, missing

    reason = missing(core)
    if reason is not None:
        return reason
    with tempfile.TemporaryDirectory() as folder:
        inside = [sys.executable, "-c", f"{before}\nimport instructions; instructions.inside({folder!r})"]
        variables = environment(core)
        variables["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
        out = Path(folder, "callgrind.out")
        if core == "compiled":
            valgrind = shutil.which("valgrind")
            if valgrind is None:
                return "there is no valgrind (on Debian and Ubuntu the package valgrind)"
            options = ["--tool=callgrind", f"--toggle-collect={ENTRY}", f"--callgrind-out-file={out}"]
            inside = [valgrind, "--quiet", *options, *inside]
        done = subprocess.run(inside, env=variables, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{core}: the run that is to be counted failed\n{done.stderr}")
        said = json.loads(done.stdout)
        instructions = said["bytecodes"]
        if core == "compiled":
            with out.open(encoding="utf-8") as file:
                instructions = ours(counted_by_object(line for line in file if line.strip()))
            if not instructions:
                raise SystemExit(f"compiled: callgrind saw no call of {ENTRY}; has mypyc another name for Engine.run?")
    return float(instructions / said["request_steps"])


def inside(folder: str) -> None:
    """The run, in the process that is counted. Says how many request-steps it had, and counts bytecode itself."""
    from sim.compiled import CORE

    engine = small_run(Path(folder))
    gc.disable()
    bytecode = None
    if CORE.name == "plain":
        bytecode = bytecodes(engine.run)
    else:
        engine.run()
    print(json.dumps({"request_steps": engine.num_request_steps, "bytecodes": bytecode}))


def main() -> int:
    """Count on both cores, and compare or agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", choices=("plain", "compiled"), help="only this one")
    parser.add_argument("--update", action="store_true", help=f"agree on what is found: write {BASELINES.name}")
    given = parser.parse_args()
    agreed: dict[str, float] = json.loads(BASELINES.read_text()) if BASELINES.exists() else {}
    failed = False
    for core in ("plain", "compiled") if given.core is None else (given.core,):
        found = count(core)
        if isinstance(found, str):
            print(f"{key(core)}: NOT COUNTED: {found}", flush=True)
            continue
        if given.update:
            agreed[key(core)] = round(found, 1)
        line, fine = verdict(key(core), found, agreed.get(key(core)))
        print(line, flush=True)
        failed |= not fine
    if given.update:
        BASELINES.write_text(json.dumps(dict(sorted(agreed.items())), indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
