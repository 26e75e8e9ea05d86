"""The committed reference is what the schema says now, and leaves nothing out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sim.scenario_messages import sections_in
from sim.scenario_schema import Scenario, Section
from sim.schema_docs import reference

FILE = Path(__file__).parent.parent / "docs" / "scenario-reference.md"


def all_sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            yield from all_sections(inner)


def test_reference_is_up_to_date() -> None:
    committed = FILE.read_text(encoding="utf-8")
    assert committed == reference(), "run `python -m sim.schema_docs`"


def test_every_key_has_a_row_and_a_meaning() -> None:
    text = reference()
    for section in all_sections(Scenario):
        for name, field in section.model_fields.items():
            assert f"| `{name}` | " in text
            assert field.description or field.is_required(), f"{section.__name__}.{name} has no description"
