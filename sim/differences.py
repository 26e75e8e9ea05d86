"""Runs side by side: what differs in their settings, and what in their figures, with intervals where there are seeds.

Knows folders of results and their summaries; must not know how a run is made.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sim import results
from sim.outcome import Figures, flat_figures
from sim.paired import Interval, interval, paired_difference
from sim.results import ResultsError

MAIN_FIGURES: Final = (
    "request_throughput",
    "output_throughput",
    "request_goodput",
    "ttft_ms_mean",
    "ttft_ms_p99",
    "tpot_ms_mean",
    "tpot_ms_p99",
    "itl_ms_mean",
    "e2el_ms_mean",
    "e2el_ms_p99",
    "mean_acceptance_length",
    "num_preemptions",
    "recomputed_tokens",
    "kv_cache_usage_perc_mean",
    "kv_cache_usage_perc_max",
    "slot_seconds_committed",
    "slot_seconds_placeholder_accepted",
    "slot_seconds_placeholder_rejected",
    "content_slot_seconds_garbage",
)
"""What is shown unless all is asked for."""
_NO_SETTING: Final = ("name", "seed", "output")
_ASIDE: Final = {"name": "name", "seed": "seed", "output": "what is recorded"}
_SPECULATION: Final = "engine.speculative_config"
_TAGS: Final = ("num_speculative_tokens", "process", "distribution", "model", "type", "path", "name")
"""Keys that say most of a mapping that other runs do not have."""


_UNITS: Final = {"": "counts", "of 1": "shares"}


@dataclass(frozen=True)
class Group:
    """Runs of one scenario with one or more seeds."""

    label: str
    """How it differs from the others, by the scenario's keys."""
    scenario: dict[str, Any]
    runs: dict[int, Figures]
    """By seed."""
    folders: list[Path]


@dataclass(frozen=True)
class Difference:
    """A figure in one group against the first."""

    figure: str
    group: int
    mean: float | None
    """Over the group's seeds that have it."""
    difference: Interval | None
    """Group less first: by seed if they share seeds, else of the two means without an interval. None for the first."""
    share: float | None
    """The difference over the first's mean on the same seeds."""


@dataclass(frozen=True)
class Comparison:
    """Groups in the order given, and every figure of each."""

    groups: list[Group]
    differences: list[Difference]
    left_out: tuple[str, ...] = ()
    """Incomplete runs in folders of several, and why each is left out."""

    def of(self, figure: str) -> list[Difference]:
        """A figure, group by group."""
        return [difference for difference in self.differences if difference.figure == figure]


def compare(folders: Sequence[str | Path], *, everything: bool = False) -> Comparison:
    """Compare runs: folders that `speckv run` has written, or folders that hold several of them.

    Runs whose scenarios differ in their seed alone are one group. The first group is what the others are held against:
    the first run given, and of a folder of runs the one that was started first. Incomplete runs in a folder of runs are
    left out. `everything`: all figures and not only `MAIN_FIGURES`.

    Raises ResultsError: a folder holds no run, a run given by name is incomplete, or there are
    fewer than two scenarios.
    """
    by_scenario: dict[str, tuple[dict[str, Any], dict[int, Figures], list[Path]]] = {}
    left_out: list[str] = []
    aside: dict[str, set[str]] = {name: set() for name in _NO_SETTING}
    for folder, manifest in (run for given in folders for run in _runs_in(Path(given), left_out)):
        scenario = {key: value for key, value in manifest["scenario"].items() if key not in _NO_SETTING}
        figures = flat_figures(results.read_json(folder / results.SUMMARY))
        key = json.dumps(scenario, sort_keys=True)
        _, runs, places = by_scenario.setdefault(key, (scenario, {}, []))
        runs[manifest["seed"]] = figures
        places.append(folder)
        for name, values in aside.items():
            values.add(_exact(manifest["scenario"].get(name)))
    if len(by_scenario) < 2:
        raise ResultsError(
            f"{', '.join(str(folder) for folder in folders)}: one scenario alone{_only(aside)}; "
            "a comparison needs two or more" + "".join(f"\n  left out: {said}" for said in left_out)
        )
    labels = _labels([scenario for scenario, _, _ in by_scenario.values()])
    groups = [
        Group(label, scenario, dict(sorted(runs.items())), places)
        for label, (scenario, runs, places) in zip(labels, by_scenario.values(), strict=True)
    ]
    names = list(dict.fromkeys(name for group in groups for run in group.runs.values() for name in run))
    if not everything:
        names = [name for name in MAIN_FIGURES if name in names]
    differences = [_difference(name, number, groups) for name in names for number in range(len(groups))]
    return Comparison(groups, differences, tuple(left_out))


def picture(comparison: Comparison, file: str | Path) -> None:
    """Bars of the differences in percent of the first, with intervals; the groups are listed on top.

    A column of panels a group, and a row a unit with a scale of its own, since percent of slot-seconds and of
    milliseconds are far apart. Raises OSError, or ValueError for a kind of file that matplotlib does not draw.
    """
    from matplotlib.figure import Figure

    rows = _by_unit(comparison)
    others = comparison.groups[1:]
    width = 4.0 + 3.0 * len(others)
    listed = [
        line
        for number, group in enumerate(comparison.groups)
        for line in textwrap.wrap(f"[{number}] {group.label}", int(12 * width), subsequent_indent="      ")
    ]
    heights = [len(names) + 1.2 for names in rows.values()]
    figure = Figure(figsize=(width, 1.2 + 0.3 * sum(heights) + 0.17 * len(listed)), layout="constrained")
    panels = figure.subplots(len(rows), len(others), sharex="row", sharey="row", squeeze=False, height_ratios=heights)
    for row, (unit, names) in zip(panels, rows.items(), strict=True):
        for number, panel in enumerate(row, 1):
            for place, name in enumerate(names):
                one = comparison.of(name)[number]
                if one.share is None or one.difference is None:
                    continue
                percent = one.share * 100
                panel.barh(place, percent, color="#4c72b0" if percent >= 0 else "#c44e52")
                if one.difference.low is not None and one.difference.mean:
                    reach = abs(percent * (one.difference.mean - one.difference.low) / one.difference.mean)
                    panel.errorbar(percent, place, xerr=reach, color="black", capsize=3)
            panel.axvline(0, color="black", linewidth=0.8)
            panel.set_yticks(range(len(names)), names, fontsize=8)
            panel.set_ylim(len(names) - 0.5, -0.5)
            panel.tick_params(axis="x", labelsize=8)
            panel.grid(axis="x", alpha=0.3)
        row[0].set_title(unit, fontsize=8, loc="left")
    for number, panel in enumerate(panels[0], 1):
        panel.set_title(f"[{number}]", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("% against [0]", fontsize=8)
    figure.suptitle("\n".join(listed), x=0.01, ha="left", fontsize=8)
    figure.savefig(file, dpi=120)


def _by_unit(comparison: Comparison) -> dict[str, list[str]]:
    """Figures that have a difference in percent, by what they are measured in; rates of either kind together."""
    from sim.report.meanings import column_meaning

    rows: dict[str, list[str]] = {}
    for name in dict.fromkeys(one.figure for one in comparison.differences):
        if all(one.share is None for one in comparison.of(name)):
            continue
        meaning = column_meaning(name)
        unit = "" if meaning is None else meaning.unit
        rows.setdefault("a second" if unit.endswith("/s") else _UNITS.get(unit, unit), []).append(name)
    return rows or {"": []}


def _runs_in(folder: Path, left_out: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """A run's folder and manifest, or those in a folder of runs in the order in which they were started."""
    results.refuse_comparison(folder)
    if (folder / results.SUMMARY).is_file() or (folder / results.MANIFEST).is_file():
        if not (folder / results.SUMMARY).is_file():
            raise ResultsError(f"{folder} holds no run: there is no {results.SUMMARY}")
        manifest = results.read_json(folder / results.MANIFEST)
        if not manifest.get("complete"):
            raise ResultsError(f"{folder} {_incomplete(manifest)}; run it again first")
        return [(folder, manifest)]
    found = []
    for file in sorted(folder.glob(f"*/{results.MANIFEST}")):
        manifest = results.read_json(file)
        if "scenario" not in manifest:
            continue
        if manifest.get("complete") and (file.parent / results.SUMMARY).is_file():
            found.append((file.parent, manifest))
        else:
            left_out.append(f"{file.parent} {_incomplete(manifest)}")
    if not found:
        reason = f"neither {results.SUMMARY} nor folders of complete runs"
        raise ResultsError(f"{folder} holds no run: {reason}" + "".join(f"\n  {said}" for said in left_out))
    # Of those that were started in the same second, the one whose manifest was written first.
    return sorted(found, key=lambda run: (str(run[1].get("started")), (run[0] / results.MANIFEST).stat().st_mtime_ns))


def _only(aside: Mapping[str, set[str]]) -> str:
    """In what runs of one scenario differ, for a message; nothing if there is one, or one several times."""
    differing = [_ASIDE[name] for name, values in aside.items() if len(values) > 1]
    return f": they differ only in {' and '.join(differing)}" if differing else ""


def _incomplete(manifest: Mapping[str, Any]) -> str:
    stopped = manifest.get("stopped_by")
    return "is incomplete" + ("" if stopped is None else f" (stopped by {stopped})")


def _difference(figure: str, number: int, groups: Sequence[Group]) -> Difference:
    own = {seed: run[figure] for seed, run in groups[number].runs.items() if run.get(figure) is not None}
    mean = _mean(list(own.values()))
    first = {seed: run[figure] for seed, run in groups[0].runs.items() if run.get(figure) is not None}
    if number == 0 or mean is None or not first:
        return Difference(figure, number, mean, None, None)
    common = sorted(set(own) & set(first))
    if common:
        base = _mean([first[seed] for seed in common])
        difference = paired_difference(
            [float(own[seed] or 0) for seed in common], [float(first[seed] or 0) for seed in common]
        )
    else:
        base = _mean(list(first.values()))
        assert base is not None
        difference = Interval(mean - base, None, None, 1)
    return Difference(figure, number, mean, difference, difference.mean / base if base else None)


def _mean(values: Sequence[int | float | None]) -> float | None:
    return interval([float(value) for value in values if value is not None]).mean if values else None


def _labels(scenarios: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each scenario by the keys in which they differ, under the shortest names that tell the keys apart."""
    flat = [_flat(scenario) for scenario in scenarios]
    for one in flat:
        if _SPECULATION in one:  # Null: what would be accepted makes no difference.
            for key in [key for key in one if key == "acceptance" or key.startswith("acceptance.")]:
                del one[key]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    differing: list[str] = []
    for key in keys:
        below = [other for other in keys if other.startswith(f"{key}.")]
        if below:  # Null in some, and a mapping in others: these are told by what says most of it.
            tag = next((f"{key}.{name}" for name in _TAGS if f"{key}.{name}" in below), None)
            differing += [key] if tag is None else [key, tag]
        elif len({_exact(one[key]) for one in flat if key in one}) > 1:
            differing.append(key)
    labels = [_label(one, list(dict.fromkeys(differing)), nulls=False) for one in flat]
    if len(set(labels)) < len(labels) or not all(labels):
        every = [key for key in keys if len({_exact(one[key]) if key in one else None for one in flat}) > 1]
        labels = [_label(one, every, nulls=True) for one in flat]
    return [label or "the others' keys are absent" for label in labels]


def _label(one: Mapping[str, Any], keys: Sequence[str], *, nulls: bool) -> str:
    parts = []
    for key in keys:
        if key == _SPECULATION and key in one:
            parts.append("no speculation")
        elif key in one and (nulls or one[key] is not None):
            parts.append(f"{_short(key, keys)}={_text(one[key])}")
        elif (
            key not in one
            and any(other.startswith(f"{key}.") for other in one)
            and not any(other.startswith(f"{key}.") for other in keys)
        ):
            parts.append(_short(key, keys))
    return ", ".join(parts)


def _short(key: str, keys: Sequence[str]) -> str:
    """The last names of a key, as many as no other key ends in."""
    names = key.split(".")
    for count in range(1, len(names)):
        short = ".".join(names[-count:])
        if not any(other != key and (other == short or other.endswith(f".{short}")) for other in keys):
            return short
    return key


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = inner
    return flat


def _exact(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _text(value: object) -> str:
    if value is None:
        return "null"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
