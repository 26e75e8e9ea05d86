"""`speckv tune` and `speckv capacity`: which settings, and how much load.

Knows what is typed and printed; the work is `sim.tune`'s and `sim.capacity`'s. Exit codes: 0 done, 1 no run succeeded,
2 bad input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer

from sim.scenario_errors import shorten

if TYPE_CHECKING:
    from sim.capacity import Capacity, Tried
    from sim.paired import Interval
    from sim.tune import LoadChange, Objective, Tuning

__all__ = ["capacity", "tune"]

_FAILED, _BAD_INPUT = 1, 2
_UNIT = {"goodput": "requests/s within the limits", "output_throughput": "tokens/s"}

_T = TypeVar("_T")


def tune(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or the name of a scenario that comes with speckv.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the scenario.")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="goodput|output_throughput", help="What is to be highest.")
    ] = "goodput",
    k: Annotated[str, typer.Option("--k", metavar="LOW:HIGH", help="Drafts a step: 0:8, or 0,1,3,5.")] = "0:8",
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", metavar="METHOD[:MODEL]", help="Try this drafter; may be given several times."),
    ] = None,
    max_num_seqs: Annotated[str | None, typer.Option("--max-num-seqs", metavar="N,N,...", help="Try these.")] = None,
    watermark: Annotated[str | None, typer.Option("--watermark", metavar="W,W,...", help="Try these.")] = None,
    by_batch_size: Annotated[
        bool, typer.Option("--by-batch-size", help="Also find K by batch size, and write vLLM's table to --table.")
    ] = False,
    table: Annotated[
        Path, typer.Option("--table", metavar="FILE", help="Where --by-batch-size writes, as JSON.")
    ] = Path("num_speculative_tokens_per_batch_size.json"),
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="As many as the finalists may see.")] = 20,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Workers; by default one a core.")] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer alone, as JSON.")] = False,
) -> None:
    """Find the K, and if asked the drafter, max_num_seqs and watermark, with which a server does most.

    Successive halving over seeds that all candidates share: at most a quarter of the runs of a full grid, or a few more
    where the grid is tiny.
    """
    from sim.scenario import ScenarioError
    from sim.tune import TuneFailed
    from sim.tune import tune as find

    if objective not in _UNIT:
        _fail(f"--objective {objective}: allowed: {', '.join(_UNIT)}", _BAD_INPUT)
    ks = _numbers("--k", k, _whole)
    try:
        with _counter(shown=not as_json) as watch:
            tuning = find(
                scenario,
                overrides or (),
                objective=cast("Objective", objective),
                k=ks,
                drafters=drafter or (),
                max_num_seqs=_numbers("--max-num-seqs", max_num_seqs, _whole),
                watermarks=_numbers("--watermark", watermark, float),
                seeds=seeds,
                by_batch_size=by_batch_size,
                jobs=jobs,
                watch=watch,
            )
    except (ScenarioError, ValueError) as error:
        _fail(str(error), _BAD_INPUT)
    except TuneFailed as error:
        _fail(str(error), _FAILED)
    if tuning.table is not None and not tuning.one_k:
        try:
            table.write_text(json.dumps(tuning.table) + "\n", encoding="utf-8")
        except OSError as error:
            _fail(f"cannot write {table}: {error.strerror or error}", _FAILED)
    if as_json:
        print(json.dumps(_plain(tuning), indent=2))
    else:
        _show_tuning(tuning, seeds, table if by_batch_size else None)


def capacity(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A YAML file, or the name of a scenario that comes with speckv.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the scenario.")
    ] = None,
    attainment: Annotated[
        float, typer.Option("--attainment", metavar="SHARE", help="Share of requests that must keep all limits of slo.")
    ] = 0.9,
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="Runs at each rate.")] = 3,
    tolerance: Annotated[
        float, typer.Option("--tolerance", metavar="SHARE", help="How near the answer must be, as a share of it.")
    ] = 0.02,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Workers; by default one a core.")] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer alone, as JSON.")] = False,
) -> None:
    """Find the highest request rate at which enough requests keep the limits of slo, and what limits it."""
    from sim.capacity import CapacityFailed
    from sim.capacity import capacity as find
    from sim.scenario import ScenarioError

    try:
        with _counter(shown=not as_json) as watch:
            found = find(
                scenario,
                overrides or (),
                attainment=attainment,
                seeds=seeds,
                tolerance=tolerance,
                jobs=jobs,
                watch=watch,
            )
    except (ScenarioError, ValueError) as error:
        _fail(str(error), _BAD_INPUT)
    except CapacityFailed as error:
        _fail(str(error), _FAILED)
    if as_json:
        print(json.dumps(_plain(found), indent=2))
    else:
        _show_capacity(found)


def _show_tuning(tuning: Tuning, seeds: int, table: Path | None) -> None:
    from sim.tune import BUDGET

    best, unit = tuning.best, _UNIT[tuning.objective]
    flags = " ".join(tuning.flags) if tuning.flags else "no --speculative-config: drafts do not pay here"
    print(f"recommended  {flags}")
    refused = _never_tried(tuning)
    if refused is not None:
        print(f"             of what could be tried: {refused}")
    count = len(best.objective)
    print(f"             {best.candidate}: {best.mean:.4g} {unit}, over {_seeds(count)}")
    if count < 2:
        print("             one seed gives no interval, and says nothing of other loads; --seeds 2 or more does")
    margin = tuning.margin
    if tuning.runner_up is not None and margin is not None:
        said = f"{_signed(margin)} {unit}{_percent(margin.over(tuning.runner_up.mean))}"
        print(f"runner-up    {tuning.runner_up.candidate}: the first is ahead by {said}")
        if tuning.tied:
            print("             that does not tell the two apart; the first takes less time from arrival to end")
        elif count > 1 and not tuning.told_apart:
            print("             too near to tell apart with these seeds")
        if count > 1 and tuning.more_seeds_may_tell:
            why = ", all that a quarter of the grid's runs left them" if count < seeds else ""
            more = f"--seeds {4 * seeds} about halves the interval"
            print(f"             they had {count} of {_seeds(seeds)}{why}; {more}")
    near = ""
    if not tuning.told_apart and not tuning.tied:
        near = "; but here the first two are too near to tell apart, so that says little"
    for change in tuning.changes:
        print(f"at other loads  {_change(change, unit)}")
    if tuning.same_at:
        said = "the same" if not near else "nothing else is better"
        times = [f"{factor:g}" for factor in sorted(tuning.same_at)]
        at = f"{', '.join(times[:-1])} and {times[-1]}" if len(times) > 1 else times[0]
        print(f"at other loads  {said} at {at} times this load{near}")
    if table is not None:
        if tuning.table is None:
            print("by batch size  no drafts at any size: no table is needed")
        elif tuning.one_k:
            print(f"by batch size  K = {tuning.table[0][2]} at every size: no table is needed, and none is written")
        else:
            print(f"by batch size  {json.dumps(tuning.table)}")
            if tuning.table_gain is not None:
                print(
                    f"               {_signed(tuning.table_gain)} {unit} against the best fixed K; written to {table}"
                )
    print("\ncandidates, best first")
    for score in tuning.scores:
        print(f"  {score.mean:>10.4g}  {_seeds(len(score.objective)):>8}  {score.candidate}")
    for candidate, reason in tuning.refused.items():
        print(f"     refused             {candidate}: {reason[:120]}")
    print(f"{tuning.num_runs} runs (a full grid: {tuning.num_grid_runs}), {tuning.num_load_runs} more at other loads")
    if tuning.num_runs * BUDGET > tuning.num_grid_runs and count > 1:
        print("more than a quarter of the grid, which is tiny: all were seen, and the last two with two seeds or more")


def _never_tried(tuning: Tuning) -> str | None:
    """Which K could not be tried at all, or how many other candidates, and why; None if all could."""
    if not tuning.refused:
        return None
    tried = {score.candidate.k for score in tuning.scores}
    never = sorted({candidate.k for candidate in tuning.refused} - tried)
    if never:
        reason = next(why for candidate, why in tuning.refused.items() if candidate.k == never[0])
        return f"K = {_spans(never)} {'was' if len(never) == 1 else 'were'} refused: {shorten(reason, 160)}"
    count, reason = len(tuning.refused), next(iter(tuning.refused.values()))
    return f"{count} candidate{'s were' if count > 1 else ' was'} refused: {shorten(reason, 160)}"


def _spans(numbers: list[int]) -> str:
    """`1, 4 to 8` of sorted whole numbers."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}"


def _change(change: LoadChange, unit: str) -> str:
    where = f"{change.key.rsplit('.', 1)[-1]} {change.load:.4g} ({change.factor:g} times)"
    if not change.in_latency:
        near = "" if change.gain.excludes_zero else f"; too near to tell apart with {_seeds(change.gain.num_values)}"
        return f"{change.candidate} is better at {where}, by {_signed(change.gain)} {unit}{near}"
    near = "" if change.saved_ms.excludes_zero else f", not told from 0 by {_seeds(change.saved_ms.num_values)}"
    return (
        f"{change.candidate} is better at {where} in latency, by {_signed(change.saved_ms)} ms from arrival to end"
        f"{near}; in {unit} the two are as good as equal there"
    )


def _show_capacity(found: Capacity) -> None:
    kept = found.highest.attainment
    of_rate = found.key.endswith(".rate")

    def load(value: float) -> str:
        return f"{value:.4g} requests/s" if of_rate else f"{found.key.rsplit('.', 1)[-1]} {value:.4g}"

    print(f"capacity  {found.request_rate:.4g} requests/s" + ("" if of_rate else f" ({load(found.highest.load)})"))
    asked = f"{found.attainment:.0%} are asked for"
    print(f"          {kept.mean:.1%} of the requests keep the limits there{_range(found.highest)}; {asked}")
    print(f"          at {load(found.above.load)} only {found.above.attainment.mean:.1%} do{_range(found.above)}")
    print(f"limit     {found.limit}: {found.why}")
    print(f"          {_beside_the_limit(found)}")
    for warning in (found.one_seed, found.warning):
        if warning is not None:
            print(f"warning   {warning}")
    print(f"{found.num_runs} runs at {len(found.tried)} loads")


def _range(tried: Tried) -> str:
    """What the seeds lie between, where there are several."""
    if len(tried.by_seed) < 2:
        return ""
    return f" ({min(tried.by_seed):.1%} to {max(tried.by_seed):.1%} by seed, {_seeds(len(tried.by_seed))})"


def _beside_the_limit(found: Capacity) -> str:
    """What the line of the limit does not say already; preemptions are a sum over runs, and said to be."""
    pressure, counts = found.pressure, found.preemptions_by_seed
    waits = {"blocks": ("blocks", pressure.blocks), "budget": ("tokens of the budget", pressure.budget)}
    waits["sequences"] = ("seats", pressure.sequences)
    said = ", ".join(f"for {what} {share:.0%}" for limit, (what, share) in waits.items() if limit != found.limit)
    they = "they also" if found.limit in waits else "requests"
    pool = "" if found.limit == "blocks" else f"; the pool is full {pressure.full:.0%} of it"
    total = f"{sum(counts)} preemption{'' if sum(counts) == 1 else 's'}"
    if len(counts) > 1:
        total += f" in {len(counts)} runs together ({min(counts)} to {max(counts)} a run)"
    return f"{they} wait {said} of the time{pool}; {total}"


def _signed(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.4g}"
    return f"{interval.mean:+.4g} (95%: {interval.low:+.4g} to {interval.high:+.4g})"


def _percent(share: Interval | None) -> str:
    if share is None:
        return ""
    if share.low is None or share.high is None:
        return f", {share.mean:+.1%}"
    return f", {share.mean:+.1%} ({share.low:+.1%} to {share.high:+.1%})"


@contextmanager
def _counter(shown: bool) -> Iterator[Callable[[int], None] | None]:
    """A line on standard error with the runs made so far, if somebody can see it."""
    if not shown or not sys.stderr.isatty():
        yield None
        return

    def show(count: int) -> None:
        print(f"\r{count} runs", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr)


def _numbers(option: str, text: str | None, kind: Callable[[str], _T]) -> list[_T]:
    """`1,2,5`, or of whole numbers `0:8` with both ends."""
    if text is None:
        return []
    try:
        if ":" in text and kind is _whole:
            first, last = (int(part) for part in text.split(":"))
            if first > last:
                _fail(
                    f"{option} {text}: the first is above the last; allowed: numbers such as {last}:{first}", _BAD_INPUT
                )
            if last > 1000:
                raise ValueError
            return [kind(str(number)) for number in range(first, last + 1)]
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "0:8 or 0,1,3,5" if kind is _whole else "0,0.01,0.05"
        _fail(f"{option} {text}: allowed: numbers such as {example}", _BAD_INPUT)


def _whole(text: str) -> int:
    return int(text)


def _plain(value: Any) -> Any:
    """Data classes and named tuples as what JSON has; the properties of a tuning and of an interval included."""
    if dataclasses.is_dataclass(value):
        plain = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        for name in ("margin", "mean", "tied"):
            if isinstance(getattr(type(value), name, None), property):
                plain[name] = _plain(getattr(value, name))
        return plain
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(entry) for name, entry in value._asdict().items() if entry is not None}
    if isinstance(value, dict):
        return [[_plain(key), _plain(entry)] for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)
