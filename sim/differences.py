"""Runs side by side: what differs in their settings, and what in their figures, with intervals where there are seeds.

Knows folders of results and their summaries; must not know how a run is made.
"""

from __future__ import annotations

import json
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

    def of(self, figure: str) -> list[Difference]:
        """A figure, group by group."""
        return [difference for difference in self.differences if difference.figure == figure]


def compare(folders: Sequence[str | Path], *, everything: bool = False) -> Comparison:
    """Compare runs: folders that `speckv run` has written, or folders that hold several of them.

    Runs whose scenarios differ in their seed alone are one group. The first group is what the others are held against.
    `everything`: all figures and not only `MAIN_FIGURES`.

    Raises ResultsError: a folder holds no run, a run is incomplete, or fewer than two scenarios are given.
    """
    by_scenario: dict[str, tuple[dict[str, Any], dict[int, Figures], list[Path]]] = {}
    for folder in (run for given in folders for run in _runs_in(Path(given))):
        manifest = results.read_json(folder / results.MANIFEST)
        if not manifest.get("complete"):
            raise ResultsError(f"{folder} is incomplete (stopped by {manifest.get('stopped_by')}); run it again first")
        scenario = {key: value for key, value in manifest["scenario"].items() if key not in _NO_SETTING}
        figures = flat_figures(results.read_json(folder / results.SUMMARY))
        key = json.dumps(scenario, sort_keys=True)
        _, runs, places = by_scenario.setdefault(key, (scenario, {}, []))
        runs[manifest["seed"]] = figures
        places.append(folder)
    if len(by_scenario) < 2:
        raise ResultsError(
            f"{', '.join(str(folder) for folder in folders)}: one scenario alone; a comparison needs two or more"
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
    return Comparison(groups, differences)


def picture(comparison: Comparison, file: str | Path) -> None:
    """Bars of the differences in percent of the first, a panel a group, with intervals.

    Raises OSError, or ValueError for a kind of file that matplotlib does not draw.
    """
    from matplotlib.figure import Figure

    names = dict.fromkeys(one.figure for one in comparison.differences)
    shown = [name for name in names if any(one.share is not None for one in comparison.of(name))]
    others = comparison.groups[1:]
    figure = Figure(figsize=(4 + 4 * len(others), 1.5 + 0.3 * len(shown)), layout="constrained")
    panels = figure.subplots(1, len(others), sharey=True, squeeze=False)[0]
    for number, (panel, group) in enumerate(zip(panels, others, strict=True), 1):
        for place, name in enumerate(shown):
            one = comparison.of(name)[number]
            if one.share is None or one.difference is None:
                continue
            percent = one.share * 100
            panel.barh(place, percent, color="#4c72b0" if percent >= 0 else "#c44e52")
            if one.difference.low is not None and one.difference.mean:
                reach = abs(percent * (one.difference.mean - one.difference.low) / one.difference.mean)
                panel.errorbar(percent, place, xerr=reach, color="black", capsize=3)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_title(group.label, fontsize=9)
        panel.set_xlabel(f"% against {comparison.groups[0].label}", fontsize=8)
        panel.set_yticks(range(len(shown)), shown, fontsize=8)
        panel.grid(axis="x", alpha=0.3)
    panels[0].invert_yaxis()
    figure.savefig(file, dpi=120)


def _runs_in(folder: Path) -> list[Path]:
    if (folder / results.SUMMARY).is_file() or (folder / results.MANIFEST).is_file():
        if not (folder / results.SUMMARY).is_file():
            raise ResultsError(f"{folder} holds no run: there is no {results.SUMMARY}")
        return [folder]
    found = sorted(file.parent for file in folder.glob(f"*/{results.SUMMARY}"))
    if not found:
        raise ResultsError(f"{folder} holds no run: neither {results.SUMMARY} nor folders with one")
    return found


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
    """Each scenario by the keys in which they differ, shortest names that tell them apart."""
    flat = [_flat(scenario) for scenario in scenarios]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    absent = object()
    differing = [key for key in keys if len({_text(one.get(key, absent)) for one in flat}) > 1]
    labels = []
    for one in flat:
        if differing and all(key.startswith("engine.speculative_config") for key in differing):
            speculation = one.get("engine.speculative_config", absent)
            if speculation is None:
                labels.append("no speculation")
                continue
        parts = [f"{key.rsplit('.', 1)[-1]}={_text(one[key])}" for key in differing if key in one]
        shown = ", ".join(parts[:4]) + (f", and {len(parts) - 4} more" if len(parts) > 4 else "")
        labels.append(shown or "the first's keys only")
    return labels


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = inner
    return flat


def _text(value: object) -> str:
    if value is None:
        return "null"
    text = str(value)
    return text if len(text) <= 30 else text[:27] + "..."
