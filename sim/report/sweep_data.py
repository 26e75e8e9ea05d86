"""What a report of a sweep shows: its rows by point and seed, axes and figures, with what they mean.

Knows the dataset as `sim.sweep.load` gives it; must not know HTML or how points are run. `sim.sweep.load` reads what is
there, so a sweep that still runs, or was stopped, can be reported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd

from sim.outcome import K_KEY
from sim.report.columns import numbers, packed
from sim.report.meanings import column_meaning
from sim.sweep import load

_FIXED: Final = ("point", "seed", "status", "error", "stopped_by", "scenario_digest")
_LOADS: Final = ("rate", "time_scale", "num_users", "concurrency", "users")
"""Ends of keys that are a load."""
_MOST_CELLS: Final = 250_000
"""Numbers that a page takes, so that it stays below 5 MB: of larger sweeps it shows fewer figures."""
_FIRST: Final = (
    "output_throughput",
    "request_goodput",
    "request_throughput",
    "e2el_ms_mean",
    "ttft_ms_mean",
    "ttft_ms_p99",
    "tpot_ms_mean",
    "tpot_ms_p99",
    "itl_ms_p99",
    "num_preemptions",
    "recomputed_tokens",
    "kv_cache_usage_perc_mean",
    "mean_acceptance_length",
    "content_slot_seconds_garbage",
    "slot_seconds_placeholder_rejected",
    "slot_seconds_lookahead",
)


def sweep_rows(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The rows of a sweep, packed, and a note where something had to be left out. Raises ResultsError."""
    frame = load(folder)
    axes = [key for key in manifest["columns"] if key in frame.columns]
    names = [name for name in frame.columns if name not in (*_FIXED, *axes)]
    names = [name for name in _FIRST if name in names] + [name for name in names if name not in _FIRST]
    constant = {name for name in names if frame[name].nunique(dropna=False) <= 1}
    kept: list[str] = []
    cells, note = 0, None
    for name in names:
        cells += 0 if name in constant else len(frame)
        if cells > _MOST_CELLS and name not in _FIRST:
            note = f"Of {len(names)} figures {len(names) - len(kept)} are left out, so that the page stays small."
            break
        kept.append(name)
    return {
        "num_rows": len(frame),
        "axes": [{"key": key, "values": _axis(frame[key])} for key in axes],
        "rows_axis": _rows_axis(axes),
        "columns_axis": _columns_axis(axes),
        "point": packed(frame["point"].tolist()),
        "seed": packed(frame["seed"].tolist()),
        "status": packed(frame["status"].tolist()),
        "error": packed([None if pd.isna(error) else str(error) for error in frame["error"]]),
        "figures": [_figure(name, frame[name]) for name in kept],
    }, note


def _figure(name: str, series: pd.Series[Any]) -> dict[str, Any]:
    meaning = column_meaning(name)
    facts = {"label": name, "unit": "", "text": "", "better": ""}
    if meaning is not None:
        facts = {"label": meaning.label, "unit": meaning.unit, "text": meaning.text, "better": meaning.better}
    return {"name": name, **facts, "values": numbers(series, 5)}


def _axis(series: pd.Series[Any]) -> Any:
    """An axis' values: numbers, texts, or None; what is a list or a mapping stays JSON text."""
    values: list[Any] = []
    for value in series.tolist():
        if value is None or value is pd.NA or (isinstance(value, float) and value != value):
            values.append(None)
        elif isinstance(value, bool | int | str):
            values.append(value)
        elif isinstance(value, float):
            values.append(int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}"))
        else:
            values.append(json.dumps(value))
    return packed(values)


def _rows_axis(axes: list[str]) -> str | None:
    """K, if it is an axis."""
    return K_KEY if K_KEY in axes else axes[0] if axes else None


def _columns_axis(axes: list[str]) -> str | None:
    """A load, if one is an axis; else the first that is not the rows'."""
    others = [key for key in axes if key != _rows_axis(axes)]
    loads = [key for key in others if key.rpartition(".")[2] in _LOADS]
    return next(iter(loads or others), None)
