"""`speckv report`: one self-contained page of a run or a sweep, to show to others.

Knows what a report has and in which order; the parts are in this package, a file each: words, meanings, the data of a
run or a sweep, and the page. Must not know how anything is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sim import __version__, results
from sim.pictures import COLOURS
from sim.report import words
from sim.report.meanings import CLASSES, CONTENT, Figure, figures
from sim.report.page import Section, bar, bullets, details, page, paragraph, picture, swatch, table, text
from sim.results import ResultsError
from sim.whole_files import written_whole

__all__ = ["report_page", "write_report"]

_CONTENT_COLOURS: Final = {
    "valid": COLOURS["committed"],
    "garbage": COLOURS["garbage"],
    "blank": COLOURS["slack"],
    "cached": COLOURS["cached"],
    "free": COLOURS["free"],
}


def write_report(
    folder: str | Path,
    output: str | Path,
    *,
    question: str | None = None,
    blocks: bool = True,
    watch: Callable[[int], None] | None = None,
) -> list[str]:
    """Write the page of a folder that `speckv run` or `speckv sweep` has made. Arguments as of `report_page`.

    Returns what the page had to go without, and why.

    Raises:
        ResultsError: it is neither, or cannot be read.
        OSError: the page cannot be written.
    """
    content, without = _page(Path(folder), question, blocks, watch)
    output = Path(output)
    with written_whole(output) as partial:
        partial.write_text(content, encoding="utf-8")
    return without


def report_page(
    folder: str | Path,
    *,
    question: str | None = None,
    blocks: bool = True,
    watch: Callable[[int], None] | None = None,
) -> str:
    """The page as HTML. The same folder gives the same page, byte for byte.

    `question`: what the reader should find answered, in place of the one made from the settings. `blocks`: make a run
    again for its map of blocks and the times of preemptions, which takes about as long as the run; `watch` is told the
    simulated ns meanwhile. Raises ResultsError if the folder is that of neither a run nor a sweep, or is damaged.
    """
    return _page(Path(folder), question, blocks, watch)[0]


def _page(
    folder: Path, question: str | None, blocks: bool, watch: Callable[[int], None] | None
) -> tuple[str, list[str]]:
    """The page, and what it had to go without."""
    manifest = results.read_json(folder / results.MANIFEST)
    try:
        if "num_points" in manifest:
            return _sweep_page(folder, manifest, question)
        if "scenario_digest" in manifest:
            return _run_page(folder, manifest, question, blocks, watch)
    except KeyError as error:
        raise ResultsError(
            f"{folder}: {results.MANIFEST} or {results.SUMMARY} is damaged: it has no {error}, which a report needs"
        ) from error
    except TypeError as error:
        raise ResultsError(f"{folder}: {results.MANIFEST} or {results.SUMMARY} is damaged: {error}") from error
    raise ResultsError(f"{folder / results.MANIFEST} is neither that of a run nor that of a sweep")


def _run_page(
    folder: Path, manifest: Mapping[str, Any], question: str | None, blocks: bool, watch: Callable[[int], None] | None
) -> tuple[str, list[str]]:
    from sim.report import run_data

    summary = results.read_json(folder / results.SUMMARY)
    scenario = manifest["scenario"]
    steps, no_steps = run_data.over_time(folder)
    requests, no_requests = run_data.request_rows(folder)
    again, not_again = run_data.again(folder, watch) if blocks else (None, None)
    without = [note for note in (no_steps, no_requests, not_again) if note is not None]
    notes = without + ([] if blocks else ["The map of blocks was left out."])
    sections = [
        Section("question", "Question", _opening(manifest, question or words.run_question(scenario)), "The question"),
        Section("short", "In short", _cards(summary) + bullets(words.findings(summary)) + _notes(notes)),
    ]
    if steps is not None:
        sections.append(Section("time", "Over time", _over_time(), "The pool over time"))
    if again is not None:
        sections.append(Section("blocks", "Blocks", _blocks_section(), "The blocks"))
    if requests is not None:
        sections.append(Section("latency", "Latencies", _latency_section()))
    sections.append(Section("room", "Room", _room(summary), "Where the room went"))
    if requests is not None:
        sections.append(Section("requests", "Requests", _requests_section()))
    sections += [
        Section("figures", "Figures", _figures(figures(summary)), "All figures, and what they mean"),
        Section("settings", "Settings", _settings(manifest)),
    ]
    data = {
        "kind": "run",
        "folder": f"{manifest['name']}/{manifest['id']}",
        "classes": [_class(label, colour) for label, colour in COLOURS.items()],
        "steps": steps,
        "again": again,
        "requests": requests,
        "slo": scenario["slo"],
        "duration_s": summary["duration_s"],
    }
    title = f"{manifest['name']}: a run of speckv"
    subtitle = f"{manifest['id']} · {manifest['preset']} · seed {manifest['seed']}"
    return page(title, subtitle, sections, data, _foot(manifest["versions"]["speckv"], manifest)), without


def _sweep_page(folder: Path, manifest: Mapping[str, Any], question: str | None) -> tuple[str, list[str]]:
    from sim.report import sweep_data

    rows, note = sweep_data.sweep_rows(folder, manifest)
    axes = [axis["key"] for axis in rows["axes"]]
    asked = question or words.sweep_question(axes, manifest["num_points"], len(manifest["seeds"]))
    axis_rows = [(text(one["key"]), text(_values(one["values"], rows["num_rows"]))) for one in rows["axes"]]
    figure_rows = [
        (f"<code>{text(one['name'])}</code>", text(one["label"]), text(one["unit"]), text(one["text"]))
        for one in rows["figures"]
    ]
    short = [f"{rows['num_rows']:,} of {manifest['num_runs']:,} runs are there: {_counts(rows)}."]
    sections = [
        Section("question", "Question", _opening(manifest, asked), "The question"),
        Section(
            "short",
            "In short",
            bullets(short) + _notes([] if note is None else [note]) + '<div data-picture="answer"></div>',
        ),
        Section("map", "By two axes", _map_section(), "One figure, by two axes"),
        Section("pareto", "Trade-off", _pareto_section(), "The trade-off: Pareto front"),
        Section("points", "Points", '<div data-picture="points"></div>', "All points"),
        Section(
            "figures",
            "Figures",
            details("What each figure means", table(("name", "figure", "unit", "meaning"), figure_rows, "figures")),
            "Figures, and what they mean",
        ),
        Section(
            "settings",
            "Settings",
            "<h3>Axes</h3>"
            + table(("axis", "values"), axis_rows, "settings")
            + "<h3>The sweep</h3>"
            + _sweep_settings(manifest),
        ),
    ]
    data = {"kind": "sweep", **rows}
    title = f"{manifest['name']}: a sweep of speckv"
    seeds = "1 seed" if len(manifest["seeds"]) == 1 else f"{len(manifest['seeds'])} seeds"
    subtitle = f"{manifest['num_points']:,} points · {seeds} · {_file(manifest['scenario_file'])}"
    return page(title, subtitle, sections, data, _foot(manifest["speckv"], manifest)), [] if note is None else [note]


def _opening(manifest: Mapping[str, Any], question: str) -> str:
    opening = paragraph(question, "question")
    if not manifest["complete"]:
        by = manifest.get("stopped_by")
        why = f": stopped by {by}" if by else ""
        opening += paragraph(f"This is incomplete{why}. The figures are of what there is.", "note warn")
    elif manifest.get("stopped_by"):
        opening += paragraph(f"Stopped by {manifest['stopped_by']}.", "note")
    return opening + "".join(paragraph(f"Warning: {one}", "note warn") for one in manifest.get("warnings", ()))


def _notes(notes: list[str]) -> str:
    return "".join(paragraph(note, "note") for note in notes)


def _cards(summary: Mapping[str, Any]) -> str:
    cards = [
        ("output throughput", words.number(summary["output_throughput"]), "tokens/s"),
        ("goodput", words.number(summary["request_goodput"]), "requests/s"),
        ("TTFT, median", words.number(summary["ttft_ms"]["median"]), "ms"),
        ("TPOT, mean", words.number(summary["tpot_ms"]["mean"]), "ms"),
        ("end to end, median", words.number(summary["e2el_ms"]["median"]), "ms"),
        ("KV cache held, mean", f"{100 * (summary['kv_cache_usage_perc']['mean'] or 0):.1f}", "%"),
        ("preemptions", words.number(summary["num_preemptions"]), ""),
        ("acceptance length", words.number(summary["mean_acceptance_length"]), "tokens"),
    ]
    shown = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)} <small>{text(unit)}</small></dd></div>"
        for name, value, unit in cards
        if value != "–"
    )
    return f'<dl class="cards">{shown}</dl>'


def _over_time() -> str:
    return (
        '<div data-picture="zoom"></div>'
        + picture("pool", "Pool occupancy by class.", "What the scheduler has promised, in percent of all slots.")
        + picture(
            "speculative",
            "Drafts, lookahead and rounding, enlarged.",
            "The line is no part of the stack: what rejected drafts leave in device memory, the other account.",
        )
        + picture("queues", "Running and waiting.", "Requests in the running list and in the waiting queue.")
        + picture("tokens", "Tokens a step.", "Prefill, one certain token a decoding frame, and drafts by their fate.")
        + _class_table()
    )


def _class_table() -> str:
    rows = [(f"{swatch(COLOURS[label])} {text(label)}", text(CLASSES[label.replace(" ", "_")])) for label in COLOURS]
    return details("What the classes mean", table(("class", "slots that are"), rows))


def _blocks_section() -> str:
    return picture(
        "blocks",
        "The pool, block by block.",
        "A row is a block, or some neighbours; a column is an instant. Nothing is averaged over time.",
    )


def _latency_section() -> str:
    return picture(
        "latency",
        "How long requests waited and ran.",
        "Bars: requests. Line: the share of requests that took no longer.",
    )


def _requests_section() -> str:
    return paragraph("Sort by any column; open a row for the story of that request.", "quiet") + (
        '<div data-picture="requests"></div>'
    )


def _map_section() -> str:
    return '<div data-picture="map"></div>' + picture(
        "lines", "The same as lines.", "One line for each row of the map; means over seeds."
    )


def _pareto_section() -> str:
    return picture(
        "pareto", "Which points nobody beats.", "On the line lie points of which no other is better in both figures."
    )


def _room(summary: Mapping[str, Any]) -> str:
    slots = summary["slot_seconds"]
    whole = sum(slots[name] for name in CLASSES) or 1.0
    rows = []
    for name, meaning in CLASSES.items():
        colour = COLOURS[name.replace("_", " ")]
        rows.append(_room_row(name.replace("_", " "), slots[name] / whole, colour, meaning))
        if name == "placeholder":
            rows += [
                _room_row(f"· {fate}", slots[f"placeholder_{fate}"] / whole, colour, f"drafts that were {fate} later")
                for fate in ("accepted", "rejected", "discarded")
            ]
    content = summary["content_slot_seconds"]
    held = [
        _room_row(name, content[name] / whole, _CONTENT_COLOURS[name], meaning)
        for name, meaning in CONTENT.items()
        if name in content
    ]
    return (
        "<h3>As the scheduler promises it</h3>"
        + table(("class", "share of the pool, over time", "slots that are"), rows, "room")
        + "<h3>As device memory holds it</h3>"
        + table(("class", "share of the pool, over time", "slots that are"), held, "room")
        + _positions(summary)
    )


def _room_row(name: str, share: float, colour: str, meaning: str) -> tuple[str, str, str]:
    return (f"{swatch(colour)} {text(name)}", bar(share, colour), text(meaning))


def _positions(summary: Mapping[str, Any]) -> str:
    """Acceptance by position of the draft."""
    if not summary["num_drafts"]:
        return ""
    rows = [
        (str(position), bar(accepted / summary["num_drafts"], COLOURS["lookahead"]), text(words.number(accepted)))
        for position, accepted in enumerate(summary["accepted_per_pos"], start=1)
    ]
    head = ("position", "verifications that accepted it", "accepted")
    return "<h3>Drafts accepted, by position</h3>" + table(head, rows, "room")


def _figures(all_figures: list[Figure]) -> str:
    parts = []
    for group in dict.fromkeys(one.group for one in all_figures):
        rows = [
            (
                f"<code>{text(one.name)}</code>",
                f'<span class="number">{text(_shown(one.value))}</span>',
                text(one.meaning.unit),
                text(one.meaning.text),
            )
            for one in all_figures
            if one.group == group
        ]
        parts.append(f"<h3>{text(group)}</h3>" + table(("name", "value", "unit", "meaning"), rows, "figures"))
    return "".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return words.number(value) if value is None or isinstance(value, int | float) else str(value)


def _settings(manifest: Mapping[str, Any]) -> str:
    scenario = manifest["scenario"]
    main = [(text(name), text(value)) for name, value in words.main_settings(scenario)]
    every = [(f"<code>{text(name)}</code>", text(value)) for name, value in words.flat_settings(scenario)]
    origin = [("scenario", _file(manifest["scenario_file"])), ("digest", manifest["scenario_digest"])]
    origin += [("run", manifest["started"])]
    origin += [(f"version of {name}", version) for name, version in manifest["versions"].items()]
    origin += [("read", f"{fact['path']} ({fact['bytes']:,} bytes)") for fact in manifest["inputs"]]
    return (
        table(("setting", "value"), main, "settings")
        + details("All settings", table(("key", "value"), every, "settings"))
        + details("Where it comes from", table(("what", "value"), [(text(a), text(b)) for a, b in origin], "settings"))
    )


def _sweep_settings(manifest: Mapping[str, Any]) -> str:
    rows = [
        ("scenario", _file(manifest["scenario_file"])),
        *((f"set {key}", value) for key, value in words.flat_settings(manifest["set"]) if key),
        ("seeds", ", ".join(str(seed) for seed in manifest["seeds"])),
        *((f"limit {key}", value) for key, value in manifest["limits"].items() if value is not None),
        ("digest", manifest["sweep_digest"]),
        ("started", manifest["started"]),
        ("finished", manifest["finished"] or "not yet"),
        *(("read", f"{fact['path']} ({fact['bytes']:,} bytes)") for fact in manifest["inputs"]),
    ]
    return table(("setting", "value"), [(text(name), text(value)) for name, value in rows], "settings")


def _values(values: Any, num_rows: int) -> str:
    """An axis' values in words: each once, or the range if there are many."""
    every = values if isinstance(values, list) else [values] * min(num_rows, 1)
    distinct = list(dict.fromkeys("null" if one is None else str(one) for one in every))
    if len(distinct) <= 12:
        return ", ".join(distinct)
    if all(isinstance(one, int | float) for one in every):
        return f"{len(distinct):,} values from {min(every):g} to {max(every):g}"
    return f"{len(distinct):,} values: {', '.join(distinct[:6])}, ..."


def _counts(rows: Mapping[str, Any]) -> str:
    statuses = rows["status"] if isinstance(rows["status"], list) else [rows["status"]] * rows["num_rows"]
    return ", ".join(f"{statuses.count(status):,} {status}" for status in sorted(set(statuses)))


def _class(label: str, colour: str) -> dict[str, str]:
    return {"key": label.replace(" ", "_"), "label": label, "colour": colour}


def _file(path: str | None) -> str:
    """A file without its folders, which are of no interest to others."""
    return "none" if path in (None, "None") else Path(str(path)).name


def _foot(version: str, manifest: Mapping[str, Any]) -> str:
    by = f"Made by speckv {__version__}"
    return f"{by}." if version == __version__ else f"{by} from what speckv {version} left."
