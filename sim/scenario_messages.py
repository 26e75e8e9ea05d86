"""What pydantic found, told in the scenario's own words; and what the schema allows, in words.

Knows: the schema's sections, pydantic's errors, where each key stands. Must not know: rules between sections, files,
or YAML.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sim.scenario_errors import ABSENT, Problem, nearest_name
from sim.scenario_schema import Scenario, Section, Spelled
from sim.scenario_source import KeyPath, Source, dotted, get

__all__ = ["ALIASES", "choice_of", "describe", "problem_at", "rename_aliases", "sections_in", "translate"]

# Other names that vLLM has for the same setting.
ALIASES: Final[Mapping[tuple[str, str], str]] = {
    ("engine", "num_gpu_blocks_override"): "num_gpu_blocks",
    ("engine", "policy"): "scheduling_policy",
}

# Settings of vLLM that somebody may well carry over, and why they are refused.
_NOT_SIMULATED: Final[Mapping[tuple[str, ...], Mapping[str, str]]] = {
    ("engine",): {
        "enable_chunked_prefill": "chunked prefill is always on here, as it is by default in vLLM",
        "scheduler_reserve_full_isl": "always on here, as it is by default in vLLM",
        "max_num_scheduled_tokens": "here it follows from max_num_batched_tokens",
        **dict.fromkeys(
            (
                "pipeline_parallel_size",
                "data_parallel_size",
                "decode_context_parallel_size",
                "enable_expert_parallel",
                "max_num_active_seqs",
                "long_prefill_token_threshold_adaptive",
                "prefill_schedule_interval",
                "swap_space",
                "cpu_offload_gb",
                "kv_transfer_config",
                "enable_lora",
                "quantization",
                "sliding_window",
            ),
            "vLLM has it, and speckv does not simulate it",
        ),
    },
    ("engine", "speculative_config"): {
        "disable_by_batch_size": "vLLM has it no more; num_speculative_tokens_per_batch_size with K = 0 does it",
        "tensor_parallel_size": "vLLM calls it draft_tensor_parallel_size here",
        **dict.fromkeys(
            (
                "parallel_drafting",
                "disable_padded_drafter_batch",
                "disable_eagle_block_drop",
                "enable_adaptive_verification",
                "max_model_len",
                "quantization",
                "suffix_decoding_max_tree_depth",
                "speculative_token_tree",
            ),
            "vLLM has it, and speckv does not simulate it",
        ),
    },
}

_K: Final = ("engine", "speculative_config", "num_speculative_tokens")

_UNITS: Final = (
    ("_gb_s", "GB/s"),
    ("_per_s", "events a second"),
    ("_gb", "GB"),
    ("_ms", "milliseconds"),
    ("_us", "microseconds"),
    ("_s", "seconds"),
    ("tokens", "tokens"),
    ("_blocks", "blocks"),
    ("_len", "tokens"),
    ("tflops", "TFLOP/s"),
)


# From pydantic's errors to ours


def rename_aliases(source: Source) -> list[Problem]:
    """Let vLLM's other names count as ours; a problem for each that is given beside ours."""
    problems = []
    for (section, alias), name in ALIASES.items():
        mapping = source.data.get(section)
        if not isinstance(mapping, dict) or alias not in mapping:
            continue
        if name in mapping:
            problems.append(problem_at(source, (section, alias), f"means {name}, which is given too", "one of the two"))
        else:
            source.rename((section,), alias, name)
    return problems


def problem_at(
    source: Source, path: KeyPath, reason: str, allowed: str = "", nearest: str | None = None, *, shown: bool = True
) -> Problem:
    """A problem with the key at ``path``: finds its value and its place."""
    value: object = ABSENT
    if shown:
        try:
            value = get(source.data, path)
        except KeyError:
            value = ABSENT
        if isinstance(value, dict | list) and len(value) > 3:
            value = ABSENT
    place = source.place(path)
    override = place.override
    return Problem(
        reason,
        dotted(path),
        value,
        allowed,
        nearest,
        file=source.label if override is None else None,
        line=place.line,
        override=override,
    )


def translate(error: ValidationError, source: Source, root: type[Section] = Scenario) -> list[Problem]:
    """Every error of pydantic's as a problem, in order of lines, overrides last. `root`: what was validated."""
    problems: dict[tuple[str, str], Problem] = {}
    for details in error.errors(include_url=False):
        problem = _one(details, source, root)
        problems.setdefault((problem.key, problem.reason), problem)
    return sorted(problems.values(), key=lambda problem: (problem.override is not None, problem.line or 0))


def _key_path(location: Sequence[str | int], data: object) -> KeyPath:
    """Pydantic's location without the tags of unions: those parts, but for the last, that are no keys of the data."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if inside:
            path.append(part)
            data = data[part]  # type: ignore[index]
        elif position == len(location) - 1 and isinstance(data, dict):
            path.append(part)
    return tuple(path)


def _one(details: ErrorDetails, source: Source, root: type[Section]) -> Problem:
    kind, context = details["type"], details.get("ctx", {})
    path = _key_path(details["loc"], source.data)
    if kind == "missing":
        field = _field(path, source.data, root)
        return problem_at(source, path, "is needed", "" if field is None else _allowed(field), shown=False)
    if kind == "extra_forbidden":
        return _unknown_key(source, path, root)
    if path and path not in _paths(source.data, path):  # a tag that ended the location
        path = path[:-1]
    if kind == "scenario":
        below = tuple(part for part in str(context["key"]).split(".") if part)
        nearest = str(context["nearest"]) or None
        return problem_at(source, path + below, str(context["reason"]), str(context["allowed"]), nearest)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        sections = _sections_at(path, source.data, root)
        key = str(context["discriminator"]).strip("'\"")
        names = [name for section in sections for name in _choices(section.model_fields[key])]
        allowed = " or ".join(names) if len(names) < 3 else ", ".join(names)
        value = get(source.data, path)
        if not isinstance(value, dict):
            return problem_at(source, path, f"is {_kind(value)}", f"a mapping with `{key}`: {allowed}")
        if kind == "union_tag_not_found":
            return problem_at(source, (*path, key), "is needed", allowed, shown=False)
        return problem_at(source, (*path, key), "is not known", allowed, nearest_name(str(value[key]), names))
    field = _field(path, source.data, root)
    value = details["input"]
    if field is None and path and isinstance(path[-1], int) and (sections := _sections_at(path, source.data, root)):
        return problem_at(source, path, _reason(kind, details, path, value), _mapping(sections))
    nearest = None
    if kind == "literal_error" and field is not None and isinstance(value, str):
        nearest = nearest_name(value, _choices(field))
    allowed = _allowed_at(kind, details, field)
    if path == _K and value == 0:
        allowed += "; no speculation is engine.speculative_config=null"
    return problem_at(source, path, _reason(kind, details, path, value), allowed, nearest)


def _paths(data: object, path: KeyPath) -> Iterator[KeyPath]:
    try:
        get(data, path)  # type: ignore[arg-type]
    except KeyError:
        return
    yield path


def _unknown_key(source: Source, path: KeyPath, root: type[Section]) -> Problem:
    key = str(path[-1])
    told = _NOT_SIMULATED.get(tuple(str(part) for part in path[:-1]), {}).get(key)
    if told is not None:
        return problem_at(source, path, f"is not a setting here: {told}")
    candidates = _sections_at(path[:-1], source.data, root)
    chosen = _chosen(candidates, path[:-1], source.data)
    others = [section for section in candidates if section is not chosen and key in section.model_fields]
    names = list(chosen.model_fields) if chosen is not None else []
    if others and chosen is not None:
        have = " or ".join(choice_of(section) for section in others)
        return problem_at(source, path, f"belongs to {have}, not to {choice_of(chosen)}", ", ".join(names))
    return problem_at(source, path, "unknown key", ", ".join(names), nearest_name(key, names))


def _reason(kind: str, details: ErrorDetails, path: KeyPath, value: object) -> str:
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        united = re.fullmatch(r"\s*([-+]?[0-9][0-9_,.]*(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ%][A-Za-zµ/%0-9]*)\s*", value)
        if united:
            unit = _unit(path)
            where = f"the key is in {unit}" if unit else "this key is a plain number"
            return f"has the unit {united[2]!r}; units stand in the names of keys, and {where}: write a number alone"
        if kind == "bool_type":
            return "is text, not true or false" + (" (YAML 1.2)" if value.lower() in _OLD_BOOLEANS else "")
        return "is text, not a number" + ("; leave the quotes out" if re.fullmatch(r"[-+0-9.eE]+", value) else "")
    if kind in _TYPE_ERRORS:
        return f"is {_kind(value)}"
    if kind == "finite_number":
        return "is not a finite number"
    if kind in _RANGE_ERRORS:
        return "is out of range"
    if kind == "literal_error":
        return "is not known"
    if kind == "string_pattern_mismatch":
        return "has characters that a name may not have, or begins with one of ._-"
    return details["msg"][:1].lower() + details["msg"][1:]


_OLD_BOOLEANS: Final = ("yes", "no", "on", "off", "y", "n")
_TYPE_ERRORS: Final = frozenset(
    ("int_type", "float_type", "bool_type", "string_type", "list_type", "dict_type", "model_type", "int_from_float")
    + ("model_attributes_type", "mapping_type", "is_instance_of")
)
_RANGE_ERRORS: Final = frozenset(("greater_than", "greater_than_equal", "less_than", "less_than_equal"))


def _allowed_at(kind: str, details: ErrorDetails, field: FieldInfo | None) -> str:
    if field is not None:
        return _allowed(field)
    context = details.get("ctx", {})
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return ", ".join(f"{words[key]} {context[key]}" for key in words if key in context)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false, not a number" if value in (True, False) else "a truth value"
    kinds = {int: "a whole number", float: "a number with a fraction", str: "text", list: "a list", dict: "a mapping"}
    return kinds.get(type(value), "something else")


def _unit(path: KeyPath) -> str | None:
    name = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), None)


# Reading the schema (also for the reference)


def sections_in(annotation: object) -> list[type[Section]]:
    """The sections that an annotation of a field may hold, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    found: list[type[Section]] = []
    for part in get_args(annotation):
        found += [section for section in sections_in(part) if section not in found]
    return found


def describe(annotation: object, metadata: Sequence[object] = ()) -> str:
    """What may be written for an annotation, in words: ``a whole number from 1 to 4096``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return describe(inner, [*more, *metadata])
    for entry in metadata:
        if isinstance(entry, Spelled):
            return entry.text
    if origin is Literal:
        return " or ".join(str(choice) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        sections = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, Section)]
        others = [part for part in get_args(annotation) if part not in sections]
        parts = [describe(part, metadata) for part in others if part is not type(None)]
        parts += [_mapping(sections)] if sections else []
        parts += ["null"] if type(None) in others else []
        if any(isinstance(constraint, BeforeValidator) for constraint in metadata):
            parts.insert(0, "a whole number")
        return " or ".join(dict.fromkeys(parts))
    if origin is list:
        (inner,) = get_args(annotation)
        return f"a list; each entry: {describe(inner)}"
    if annotation is type(None):
        return "null"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "text"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        number = "a whole number or " if any(isinstance(entry, BeforeValidator) for entry in metadata) else ""
        return number + _mapping([annotation])
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    return "a value"


def _mapping(sections: Sequence[type[Section]]) -> str:
    tags = [choice_of(section).partition(": ") for section in sections]
    if not tags[0][0]:
        return "a mapping"
    return f"a mapping with `{tags[0][0]}`: {' or '.join(choice for _, _, choice in tags)}"


def _bounds(metadata: Sequence[object]) -> str:
    low: str = ""
    high: str = ""
    for constraint in _flat(metadata):
        match constraint:
            case Ge(ge=bound):
                low = f"from {_number(bound)}"
            case Gt(gt=bound):
                low = f"above {_number(bound)}"
            case Le(le=bound):
                high = f"{'to' if low.startswith('from') else 'up to'} {_number(bound)}"
            case Lt(lt=bound):
                high = f"{'to below' if low.startswith('from') else 'below'} {_number(bound)}"
            case _:
                pass
    if low.startswith("above") and high:
        high = f"and {high}"
    return "".join(f" {part}" for part in (low, high) if part)


def _number(bound: object) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _flat(metadata: Sequence[object]) -> Iterator[object]:
    for entry in metadata:
        if isinstance(entry, FieldInfo):
            yield from _flat(entry.metadata)
        else:
            yield entry


def _allowed(field: FieldInfo) -> str:
    text = describe(field.annotation, field.metadata)
    sections = sections_in(field.annotation)
    if len(sections) == 1 and get_origin(field.annotation) is not list:
        text = text.replace("a mapping", f"a mapping with the keys {', '.join(sections[0].model_fields)}", 1)
    return text


def _choices(field: FieldInfo) -> list[str]:
    def walk(annotation: object) -> Iterator[str]:
        if get_origin(annotation) is Literal:
            yield from (str(choice) for choice in get_args(annotation))
        else:
            for part in get_args(annotation):
                yield from walk(part)

    return list(walk(field.annotation))


def choice_of(section: type[Section]) -> str:
    """How a section of a choice is told apart: ``process: poisson``; empty where there is no choice."""
    for name in ("process", "distribution", "model", "type"):
        field = section.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is Literal and field.is_required():
            return f"{name}: {get_args(field.annotation)[0]}"
    return ""


def _sections_at(path: KeyPath, data: object, root: type[Section]) -> list[type[Section]]:
    """The sections that may stand at ``path``, narrowed on the way by what the data has chosen."""
    sections: list[type[Section]] = [root]
    for part in path:
        chosen = _chosen(sections, (), data)
        if isinstance(part, str):
            field = None if chosen is None else chosen.model_fields.get(part)
            sections = [] if field is None else sections_in(field.annotation)
        data = _step(data, part)
    return sections


def _step(data: object, part: str | int) -> object:
    if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
        return data[part]  # type: ignore[index]
    return None


def _chosen(sections: Sequence[type[Section]], path: KeyPath, data: object) -> type[Section] | None:
    for part in path:
        data = _step(data, part)
    if len(sections) == 1:
        return sections[0]
    for section in sections:
        name, _, choice = choice_of(section).partition(": ")
        if isinstance(data, dict) and data.get(name) == choice:
            return section
    return None


def _field(path: KeyPath, data: object, root: type[Section]) -> FieldInfo | None:
    """The field that ``path`` names, if it names one (not an entry of a list)."""
    if not path or not isinstance(path[-1], str):
        return None
    chosen = _chosen(_sections_at(path[:-1], data, root), path[:-1], data)
    return None if chosen is None else chosen.model_fields.get(path[-1])
