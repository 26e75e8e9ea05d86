"""`speckv sweep`: many runs into one dataset, with progress, and going on where it was stopped.

Knows what is typed and printed; the work is `sim.sweep`'s. Exit codes: 0 done, 1 stopped while running, 2 bad input,
130 Ctrl-C. Runs that fail do not fail the sweep: they are counted, and their rows say why.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, cast

import typer

from sim.commands.paths import given_path

if TYPE_CHECKING:
    from sim.sweep import SweepProgress, SweepResult

__all__ = ["sweep"]

_STOPPED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130


def sweep(
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="A YAML file, or the name of a sweep that comes with speckv.")
    ],
    out: Annotated[
        Path, typer.Option("--out", parser=given_path, metavar="DIR", help="Where the dataset goes: DIR/<name>/.")
    ] = Path("results/sweeps"),
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, metavar="N", help="Workers; by default one a core.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="local|ray", help="Where the workers are.")] = "local",
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="Of a running Ray cluster, or auto; else one starts here."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress; print where the dataset is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest alone, as JSON.")] = False,
) -> None:
    """Run a sweep: every point of its axes with every seed, into one Parquet dataset.

    Given again, it goes on where it was stopped. Points that are equal are run once.
    """
    from sim.results import ResultsError
    from sim.sweep import SweepError, SweepStopped
    from sim.sweep import sweep as run_sweep
    from sim.terminal import Line

    if backend not in ("local", "ray"):
        _fail(f"--backend {backend}: allowed: local, ray", _BAD_INPUT)
    if address is not None and backend != "ray":
        _fail("--address belongs to --backend ray", _BAD_INPUT)
    where = cast(Literal["local", "ray"], backend)
    began = time.monotonic()
    try:
        with Line("sweeping", shown=not quiet and not as_json) as line:

            def watch(progress: SweepProgress) -> None:
                line.show(progress.done, progress.total, lambda: facts(progress))

            result = run_sweep(sweep, out=out, jobs=jobs, backend=where, address=address, watch=watch)
    except SweepError as error:
        _fail(str(error), _BAD_INPUT)
    except ResultsError as error:
        _fail(str(error), _STOPPED)
    except SweepStopped as error:
        _fail(str(error).replace("\n", "\nspeckv: "), _STOPPED)
    except KeyboardInterrupt:
        _fail("interrupted; what has finished is kept, and the same command goes on from there", _INTERRUPTED)
    if as_json:
        print(json.dumps(result.manifest, indent=2))
    elif quiet:
        print(result.folder)
    else:
        _show(result, time.monotonic() - began)


def _show(result: SweepResult, seconds: float) -> None:
    manifest = result.manifest
    counts = ", ".join(f"{count:,} {status}" for status, count in manifest["counts"].items())
    print(f"{manifest['num_points']:,} points, {manifest['num_runs']:,} runs: {counts}  ({seconds:.1f} s)")
    if set(manifest["counts"]) - {"ok"}:
        frame = result.table()
        failed = frame[frame["status"] != "ok"]
        for row in failed.head(5)[["point", "seed", "status", "error"]].itertuples(index=False):
            print(f"  point {row[0]}, seed {row[1]}: {row[2]}: {str(row[3])[:200]}")
        if len(failed) > 5:
            print(f"  and {len(failed) - 5} more; the rows say why")
    print(f"dataset  {result.folder}")
    print(f'read it  sim.sweep.load("{result.folder}")')


def facts(progress: SweepProgress) -> str:
    """`3 of 12 done, 1 failed, 2 running, 1:05 left`."""
    parts = [f"{progress.done:,} of {progress.total:,} done"]
    parts += [f"{progress.failed:,} failed"] if progress.failed else []
    parts.append(f"{progress.running} running")
    if progress.left_s is not None:
        minutes, seconds = divmod(round(progress.left_s), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
    return ", ".join(parts)


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
