"""The reference of all scenario keys, written from the schema: ``python -m sim.schema_docs`` writes it.

Knows the schema and Markdown. Must not know what a scenario is used for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from sim.policies.presets import PRESETS
from sim.scenario import ACCEPTANCE_RATES
from sim.scenario_messages import ALIASES, choice_of, describe, sections_in
from sim.scenario_schema import Scenario, Section

__all__ = ["reference", "write_reference"]

_OPENING = """# Scenario reference

Written by `python -m sim.schema_docs` from `sim/scenario_schema.py`; do not edit.

A scenario is a YAML mapping. Every key may be left out, unless it is marked *needed*; an unknown key is an error.
Types are strict (`"5"` is no number, `yes` is no truth value), and units stand in the names of the keys. Anchors,
aliases, tags and a second document are not read. On the command line `--set engine.max_num_seqs=64` overrides a key,
`--set events.0.at_s=5` an entry of a list; the value is YAML, so `null` brings the default back.
"""


def reference() -> str:
    """The text of docs/scenario-reference.md."""
    parts = [_OPENING]
    parts.append(f"Presets: {', '.join(f'`{name}`' for name in PRESETS)}.\n")
    rates = ", ".join(f"{method} {rate}" for method, rate in ACCEPTANCE_RATES.items())
    parts.append(
        f"Where `acceptance` is left out it is geometric, by method: {rates} (sources in `sim/scenario.py`). The "
        "figures for eagle and the n-grams are stand-ins.\n"
    )
    also = ", ".join(f"`{section}.{alias}` for `{section}.{name}`" for (section, alias), name in ALIASES.items())
    parts.append(f"Also read: {also}.\n")
    for heading, section in _walk("", Scenario, set()):
        parts.append(_section(heading, section))
    return "\n".join(parts)


def write_reference(folder: Path) -> Path:
    """Write docs/scenario-reference.md below ``folder`` (the repository) and return its path."""
    file = folder / "docs" / "scenario-reference.md"
    file.write_text(reference(), encoding="utf-8", newline="\n")
    return file


def _walk(key: str, section: type[Section], seen: set[type[Section]]) -> Iterator[tuple[str, type[Section]]]:
    seen.add(section)
    yield key, section
    for name, field in section.model_fields.items():
        below = f"{key}.{name}" if key else name
        for inner in sections_in(field.annotation):
            if inner not in seen:
                yield from _walk(below, inner, seen)


def _section(key: str, section: type[Section]) -> str:
    choice = choice_of(section)
    title = "The whole" if not key else f"`{key}`" + (f" with `{choice}`" if choice else "")
    if "distribution" in choice:
        kind = "Seconds" if section.__name__.endswith("Seconds") else "Numbers of tokens and the like"
        title = f"{kind} with `{choice}`"
    lines = [f"## {title}", "", _one_line(section.__doc__ or ""), ""]
    lines += ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if choice.startswith(f"{name}: "):
            lines.append(
                f"| `{name}` | {choice.partition(': ')[2]} | *needed* | Tells which of the mappings this is. |"
            )
        else:
            cells = (f"`{name}`", describe(field.annotation, field.metadata), _default(field), field.description or "")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    value = field.default
    if isinstance(value, Section):
        written = value.model_dump(mode="json", exclude_defaults=True)
        return f"`{json.dumps(written)}`" if written and len(json.dumps(written)) < 100 else "its defaults"
    return "the file's name" if value == "" else f"`{json.dumps(value)}`"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    write_reference(Path(__file__).parent.parent)
