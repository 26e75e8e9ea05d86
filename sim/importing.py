"""A scenario from what is running: command line, start-up log, trace and acceptance in, YAML with its origins out.

Knows which of vLLM's settings mean what to a scenario, which change decisions in a way that is not modelled, and which
have no meaning here. Writes YAML as text and has it read back by `sim.scenario`; must not read YAML itself, nor run
anything.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sim import __version__
from sim.acceptance_sources import read_sources
from sim.build import blocks_in
from sim.models.acceptance import AcceptanceError
from sim.models.acceptance_fit import Figures, Steps, fit
from sim.models.hardware import UnknownName, hardware
from sim.policies.presets import DEFAULT_PRESET, VLLM_PRESETS
from sim.scenario import Scenario, ScenarioError, load_scenario
from sim.vllm_settings import (
    KNOWN_FLAGS,
    Setting,
    SettingsError,
    find_command,
    human_readable,
    read_cache_config,
    read_command,
    read_json_object,
    read_meta,
    read_start_up,
    text_lines,
)
from workloads.traces import Trace, TraceError, detect_format

__all__ = ["ImportFailed", "Imported", "import_sources"]

_LOOKED_AT: Final = 100_000
"""Requests of a trace that are read to see whether it can be."""
_LOG_MARKS: Final = (
    "non-default args:",
    "LLM engine (v",
    "KV cache size:",
    "SpecDecoding metrics:",
    "Avg generation throughput:",
)
_TYPED: Final = ("rates=", "conditional=", "length=")
_REAL_RUN_COLUMNS: Final = {
    "arrival": "arrival_time",
    "prompt_tokens": "input_toks",
    "output_tokens": "output_toks",
    "unit": "s",
}


class ImportFailed(ValueError):
    """Sources that cannot be read or make no scenario. The message names the place, the value and what is allowed."""


@dataclass(frozen=True)
class Imported:
    """What came of it."""

    text: str
    """The scenario, as YAML with comments."""
    scenario: Scenario
    """The same, read back and checked."""
    not_modelled: tuple[str, ...]
    """Settings that change what the server decides or costs, and are not in the scenario."""
    ignored: tuple[str, ...]
    """Settings without a meaning here, and those that are not known."""
    warnings: tuple[str, ...]
    """Contradictions between sources, and what was read otherwise than written."""
    assumed: tuple[str, ...]
    """Keys whose values no source says."""


# What settings mean

_NOT_MODELLED: Final[Mapping[str, str]] = {
    "pipeline_parallel_size": "pipeline stages: the scenario runs all layers in one stage",
    "data_parallel_size": "several engines share the load: the scenario is one of them, and gets all requests",
    "decode_context_parallel_size": "KV split over ranks by context: the pool is counted as if it were not",
    "prefill_context_parallel_size": "prompts split over ranks: prefill costs are those of one",
    "enable_expert_parallel": "experts split whole over ranks: costs are those of tensor parallelism",
    "enable_eplb": "experts are moved while serving: costs are not",
    "enable_dbo": "two half batches overlap: costs are those of one",
    "ubatch_size": "micro-batches overlap: costs are those of one batch",
    "enable_lora": "LoRA adapters: neither their cost nor that blocks are shared within an adapter only",
    "lora_modules": "LoRA adapters: neither their cost nor that blocks are shared within an adapter only",
    "kv_transfer_config": "KV comes from or goes to elsewhere: only what is computed here is simulated",
    "kv_offloading_size": "KV is offloaded to host memory: evicted blocks are lost in the scenario",
    "kv_offloading_backend": "KV is offloaded to host memory: evicted blocks are lost in the scenario",
    "cpu_offload_gb": "weights in host memory: steps are slower and the pool larger than in the scenario",
    "offload_group_size": "weights in host memory: steps are slower and the pool larger than in the scenario",
    "sliding_window": "sliding-window attention frees blocks behind the window: the scenario keeps them",
    "disable_sliding_window": "models with a sliding window are not modelled either way",
    "swa_bounded_replay": "sliding-window attention is not modelled",
    "scheduler_cls": "a scheduler of one's own: the scenario has vLLM's",
    "max_num_scheduled_tokens": "the step's budget is max_num_batched_tokens in the scenario",
    "max_num_active_seqs": "admission is limited by max_num_seqs alone in the scenario",
    "max_num_queued_reqs": "requests beyond a queue's length are refused by the server: here they wait",
    "max_num_queued_tokens": "requests beyond a queue's length are refused by the server: here they wait",
    "long_prefill_token_threshold_adaptive": "the limit of a prefill's chunk is fixed in the scenario",
    "prefill_schedule_interval": "prefills are scheduled in every step in the scenario",
    "prefix_cache_retention_interval": "cached blocks are evicted by age of use alone in the scenario",
    "prefix_match_unit": "prefixes are matched by block in the scenario",
    "kv_sharing_fast_prefill": "layers that share KV skip prefill: costs are those of all layers",
    "kv_cache_dtype_skip_layers": "every layer's KV has the same type in the scenario",
    "hf_overrides": "the model's configuration is changed: the scenario has the model as it is known",
    "model_class_overrides": "another class of model: the scenario has the model as it is known",
    "runner": "pooling models are not modelled",
    "convert": "pooling models are not modelled",
    "diffusion_config": "diffusion models are not modelled",
    "limit_mm_per_prompt": "images and the like: neither their encoder nor its budget is modelled",
    "cudagraph_capture_sizes": "graphs are captured at vLLM's default sizes in the scenario",
    "max_cudagraph_capture_size": "graphs are captured at vLLM's default sizes in the scenario",
    "compilation_config": "compilation and graphs are vLLM's defaults in the scenario",
    "performance_mode": "graphs and kernels are those of the balanced mode",
    "optimization_level": "compilation and graphs are vLLM's defaults in the scenario",
    "kv_cache_memory_bytes": "",
    "config": "a file of flags: it is not read; write its flags on the command line",
    "use_replayssm": "state-space layers are not modelled",
    "mamba_cache_mode": "state-space layers are not modelled",
    "mamba_block_size": "state-space layers are not modelled",
    "num_scheduler_steps": "several steps a schedule (vLLM before version 1) are not modelled",
}
_OFF: Final = (None, False, "false", "False", "", "0", 0, "{}", "auto", "none", "None", "balanced", "generate")
_ONES: Final = ("1", 1)
_READ_ELSEWHERE: Final = frozenset(
    """model tensor_parallel_size dtype quantization kv_cache_dtype block_size gpu_memory_utilization
    num_gpu_blocks_override num_gpu_blocks max_num_seqs max_num_batched_tokens max_model_len enable_prefix_caching
    watermark scheduling_policy long_prefill_token_threshold async_scheduling speculative_config spec_method spec_model
    spec_tokens enforce_eager attention_backend kv_cache_tokens one_line available_kv_cache_gib device_name
    kv_cache_memory_bytes enable_chunked_prefill scheduler_reserve_full_isl""".split()
)
_SPECULATION_KEYS: Final = frozenset(
    """method model num_speculative_tokens num_speculative_tokens_per_batch_size prompt_lookup_min prompt_lookup_max
    draft_tensor_parallel_size draft_sample_method rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length""".split()
)
_METHODS: Final = ("ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model")
_ENGINE_DEFAULTS: Final[Mapping[str, str]] = {
    "tensor_parallel_size": "vLLM's default",
    "quantization": "vLLM's default",
    "kv_cache_dtype": "vLLM's default",
    "block_size": "vLLM's default",
    "max_num_seqs": "vLLM's default on this card",
    "max_num_batched_tokens": "vLLM's default on this card",
    "max_model_len": "the model's own, vLLM's default",
    "enable_prefix_caching": "vLLM's default",
    "watermark": "vLLM's default",
    "scheduling_policy": "vLLM's default",
    "long_prefill_token_threshold": "vLLM's default",
    "async_scheduling": "as vLLM decides for this method",
}
"""Engine settings that are written in any case, in this order, and where their value comes from if no source has it."""


@dataclass
class _Found:
    """What the sources say, as it is gathered."""

    settings: dict[str, Setting] = field(default_factory=dict)
    version: Setting | None = None
    speculation: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    trace: tuple[Path, dict[str, Any]] | None = None
    acceptance: list[str] = field(default_factory=list)
    acceptance_in_logs: list[str] = field(default_factory=list)
    acceptance_file: tuple[dict[str, Any], str] | None = None
    sources: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    """The files among them; comments name them without their folders."""
    not_modelled: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def put(self, setting: Setting, ran: bool) -> None:
        """Take a setting. `ran`: the server itself says so, which counts before what was asked for."""
        before = self.settings.get(setting.name)
        if before is not None and not _same(before.value, setting.value):
            if _same(setting.value, "auto") or _same(setting.value, "-1"):
                return
            if not (_same(before.value, "auto") or _same(before.value, "-1")):
                kept, dropped = (setting, before) if ran else (before, setting)
                self.warnings.append(
                    f"{setting.name}: {kept.place} says {kept.value!r} and {dropped.place} says {dropped.value!r}; "
                    "the former is taken"
                )
                if not ran:
                    return
        self.settings[setting.name] = setting


def _same(one: Any, other: Any) -> bool:
    def plain(value: Any) -> str:
        text = str(value).lower().removeprefix("torch.")
        number = human_readable(str(value))
        return text if number is None else str(number)

    return plain(one) == plain(other)


# Sources


def import_sources(sources: Sequence[str], overrides: Sequence[str] = (), *, output: Path | None = None) -> Imported:
    """Make a scenario of SOURCE...

    A source is a `vllm serve` command line, or a file that holds one; the JSON of `--speculative-config`; a start-up
    log; a recorded configuration (LLMServingSim's `meta.json`); a metrics scrape, for its cache configuration; a trace
    of any format that `workloads.traces` reads; or an acceptance source: what `sim.acceptance_sources` reads, typed
    rates, or a YAML file that `speckv acceptance fit -o` wrote. `overrides`: `hardware=rtx-4090` and the like, which
    count before all sources. `output`: where the text is to go; paths in it count from there.

    Raises ImportFailed with the place of what cannot be read, and where no scenario comes of it.
    """
    if not sources:
        raise ImportFailed("no source was given")
    found = _Found()
    try:
        for source in sources:
            _read(found, source)
        return _written(found, list(overrides), output)
    except (SettingsError, TraceError, AcceptanceError) as error:
        raise ImportFailed(str(error)) from None


def _read(found: _Found, source: str) -> None:
    text = source.strip()
    if text.startswith(_TYPED):
        found.acceptance.append(text)
        found.sources.append(f"{text} (acceptance)")
        return
    path = Path(source)
    if text.startswith("{"):
        found.speculation.append((_speculation_json(text, "the JSON given"), "the JSON given"))
        found.sources.append("a speculative_config in JSON")
        return
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        if text.startswith("-") or find_command(text):
            _command(found, text, "command line", numbered=False)
            return
        raise ImportFailed(f"{source}: no such file, and no `vllm serve` command line")
    _read_file(found, path)


def _read_file(found: _Found, path: Path) -> None:
    found.paths.append(path)
    name = path.name.lower()
    if name.endswith((".yaml", ".yml")):
        section = load_scenario(path).acceptance if _is_acceptance(path) else None
        if section is None:
            raise ImportFailed(f"{path}: YAML is read for its `acceptance`, and there is none in it")
        found.acceptance_file = (section.model_dump(mode="json", exclude_none=True), str(path))
        found.sources.append(f"{path} (acceptance)")
        return
    if name.endswith((".parquet", ".csv", ".csv.gz")):
        _trace(found, path)
        return
    head: list[tuple[int, str]] = []
    is_log = is_metrics = False
    for number, line in text_lines(path):
        if len(head) < 2000:
            head.append((number, line))
        if any(mark in line for mark in _LOG_MARKS):
            is_log = True
            break
        if line.startswith("vllm:"):
            is_metrics = True
            break
        if number == 1 and line.lstrip()[:1] in ("{", "["):
            break
    if not any(line.strip() for _, line in head):
        raise ImportFailed(f"{path}: is empty")
    if is_log:
        _log(found, path)
    elif is_metrics:
        lines = [(number, line) for number, line in text_lines(path) if line.startswith("vllm:")]
        for setting in read_cache_config(lines, path).settings:
            found.put(setting, ran=True)
        if any("spec_decode_num_drafts" in line for _, line in lines):
            found.acceptance.append(str(path))
        found.sources.append(f"{path} (metrics)")
    elif head[0][1].lstrip()[:1] in ("{", "["):
        _json(found, path, next(line for _, line in head if line.strip()))
    else:
        whole = "\n".join(line for _, line in text_lines(path))
        if find_command(whole):
            _command(found, whole, str(path), numbered=True)
        else:
            _trace(found, path)


def _is_acceptance(path: Path) -> bool:
    return any(line.startswith("acceptance:") for _, line in text_lines(path))


def _command(found: _Found, text: str, place: str, *, numbered: bool) -> None:
    command = read_command(text, place, numbered=numbered)
    asked: dict[str, Any] = {}
    where = place
    for setting in command.settings:
        head, dot, below = setting.name.partition(".")
        spec = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}.get(head)
        if head == "speculative_config" and not dot:
            where = setting.place
            asked |= _speculation_json(str(setting.value), setting.place)
        elif head == "speculative_config" or spec is not None:
            where = setting.place
            asked[spec or below.replace("-", "_")] = _json_or_text(str(setting.value))
        else:
            found.put(setting._replace(name=head) if dot else setting, ran=False)
    if asked:
        found.speculation.append((asked, where))
    found.warnings.extend(command.notes)
    found.sources.append("a command line" if place == "command line" else f"{place} (command line)")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _speculation_json(text: str, place: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ImportFailed(f"{place}: malformed JSON ({error.msg}, column {error.colno}): {text[:60]!r}") from None
    except RecursionError:
        raise ImportFailed(f"{place}: malformed JSON (nested too deep)") from None
    if not isinstance(read, dict):
        raise ImportFailed(f'{place}: speculative_config = {text[:60]}: expected an object such as {{"method": ...}}')
    return {str(key).replace("-", "_"): value for key, value in read.items()}


def _log(found: _Found, path: Path) -> None:
    told = 0
    try:
        start = read_start_up(path)
    except SettingsError:
        start = None
        if not any("SpecDecoding metrics:" in line for _, line in text_lines(path)):
            raise
    if start is not None:
        for setting in start.settings:
            if setting.name == "speculative_config":
                if isinstance(setting.value, dict):
                    found.speculation.insert(0, (dict(setting.value), setting.place))
                elif setting.value is not None:
                    found.speculation.insert(0, (_speculation_json(str(setting.value), setting.place), setting.place))
                continue
            found.put(setting, ran=True)
            told += 1
        found.version = start.version or found.version
        found.warnings.extend(start.notes)
    if any("SpecDecoding metrics:" in line for _, line in text_lines(path)):
        found.acceptance_in_logs.append(str(path))
    found.sources.append(f"{path} ({'start-up log' if told else 'log'})")


def _json(found: _Found, path: Path, first: str) -> None:
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict) and {"arrival_time", "input_toks", "output_toks", "first_token_ts"} <= set(line):
        _trace(found, path, {"format": "columns", "columns": dict(_REAL_RUN_COLUMNS)})
        return
    whole = line
    if path.suffix == ".json" or line is None:
        whole = None
        size = path.stat().st_size
        if size < 16_000_000 and path.suffix == ".json":
            whole = read_json_object(path)
    if isinstance(whole, dict) and "resolved_config" in whole:
        start = read_meta(path, whole)
        for setting in start.settings:
            if setting.name == "speculative_config":
                if isinstance(setting.value, dict):
                    found.speculation.insert(0, (dict(setting.value), setting.place))
                continue
            found.put(setting, ran=True)
        found.version = start.version or found.version
        found.sources.append(f"{path} (recorded configuration)")
        return
    if isinstance(whole, dict) and "num_speculative_tokens" in whole and "method" in whole:
        found.speculation.append(({str(k).replace("-", "_"): v for k, v in whole.items()}, str(path)))
        found.sources.append(f"{path} (speculative_config)")
        return
    try:
        format = detect_format(path)
    except TraceError as error:
        try:
            read_sources([str(path)])
        except AcceptanceError:
            raise error from None
        found.acceptance.append(str(path))
        found.sources.append(f"{path} (acceptance)")
        return
    _trace(found, path, {"format": format})
    if format == "vllm_bench" and isinstance(whole, dict) and whole.get("spec_decode_num_drafts"):
        found.acceptance.append(str(path))


def _trace(found: _Found, path: Path, told: dict[str, Any] | None = None) -> None:
    if found.trace is not None:
        raise ImportFailed(f"{path} and {found.trace[0]} are both traces: one is read")
    if told is None:
        told = {"format": detect_format(path)}
    found.trace = (path, told)
    found.sources.append(f"{path} (trace, {told['format']})")


# The scenario


@dataclass
class _Entry:
    """A line of the scenario: `key` below `section`, its value and the comment."""

    section: str
    key: str
    value: Any
    comment: str
    assumed: bool = False


def _written(found: _Found, overrides: list[str], output: Path | None) -> Imported:
    entries = _entries(found)
    folder = Path() if output is None else output.parent
    entries += _workload(found, folder)
    asked = {text.partition("=")[0].strip() for text in overrides}
    scenario = _loaded(_plain_text(entries), overrides, folder)
    entries += _from_bytes(found, entries, scenario, asked)
    scenario = _loaded(_plain_text(entries), overrides, folder)
    resolved = scenario.resolved()
    entries = _with_overrides(entries, asked, resolved)
    _add_assumed(entries, resolved, scenario)
    text = _text(found, entries, output)
    return Imported(
        text,
        _loaded(text, (), folder),
        tuple(found.not_modelled),
        tuple(found.ignored),
        tuple(dict.fromkeys([*found.warnings, *scenario.warnings])),
        tuple(f"{entry.section}.{entry.key}".lstrip(".") for entry in entries if entry.assumed),
    )


def _loaded(text: str, overrides: Sequence[str], folder: Path) -> Scenario:
    """The text read by the scenario's own reader, as if it lay in `folder`. Raises ImportFailed."""
    place = folder if folder.is_dir() else Path()
    try:
        handle, name = tempfile.mkstemp(suffix=".yaml", prefix=".speckv-import-", dir=place)
    except OSError as error:
        raise ImportFailed(f"cannot write in {place}: {error.strerror or error}") from None
    file = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        return load_scenario(file, overrides)
    except ScenarioError as error:
        problems = [
            f"  - {problem.key} = {problem.value!r}: {problem.reason}"
            + (f"\n      allowed: {problem.allowed}" if problem.allowed else "")
            for problem in error.problems
        ]
        raise ImportFailed(
            "the sources make no scenario that can be run; set a key with --set KEY=VALUE:\n" + "\n".join(problems)
        ) from None
    finally:
        file.unlink(missing_ok=True)


def _entries(found: _Found) -> list[_Entry]:
    """What the sources say, in the order in which it is written; fills the lists of what is left out."""
    settings = found.settings
    entries: list[_Entry] = []

    def add(section: str, key: str, value: Any, place: str, note: str = "") -> None:
        entries.append(_Entry(section, key, value, f"from {place}" + (f"; {note}" if note else "")))

    def taken(name: str, read: Callable[[Setting], Any], section: str = "engine", key: str | None = None) -> None:
        setting = settings.get(name)
        if setting is not None and setting.value is not None:
            value = read(setting)
            if value is not None:
                add(section, key or name, value, setting.place)

    if "model" not in settings:
        raise ImportFailed(
            "no source says which model is served: a `vllm serve MODEL` command line or a start-up log does"
        )
    model = settings["model"]
    add("", "model", str(model.value), model.place)
    _card(found, entries)
    _preset(found, entries)
    taken("tensor_parallel_size", _whole)
    for name, allowed in (("quantization", ("fp8",)), ("kv_cache_dtype", ("auto", "bfloat16", "fp8", "fp8_e4m3"))):
        setting = settings.get(name)
        if setting is None or setting.value in (None, "None"):
            continue
        text = str(setting.value).lower().removeprefix("torch.")
        if text in allowed:
            add("engine", name, text, setting.place)
        else:
            found.not_modelled.append(
                f"{setting.place}: {name} {text}: allowed here: {', '.join(allowed)}; the scenario has vLLM's default"
            )
    dtype = settings.get("dtype")
    if dtype is not None:
        text = str(dtype.value).removeprefix("torch.")
        if text not in ("auto", "bfloat16"):
            how = "costs the same" if text in ("half", "float16") else "costs more"
            found.not_modelled.append(f"{dtype.place}: dtype {text}: the scenario has bfloat16, and {text} {how}")
    taken("block_size", _whole)
    blocks = _num_gpu_blocks(found)
    if blocks is not None:
        add("engine", "num_gpu_blocks", blocks[0], blocks[1], blocks[2])
    taken("gpu_memory_utilization", _number)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        taken(name, _whole)
    taken("max_model_len", _length)
    taken("enable_prefix_caching", _truth)
    taken("watermark", _number)
    taken("scheduling_policy", lambda setting: str(setting.value))
    taken("long_prefill_token_threshold", _whole)
    taken("async_scheduling", _truth)
    chunked = settings.get("enable_chunked_prefill")
    if chunked is not None and _truth(chunked) is False:
        found.not_modelled.append(f"{chunked.place}: chunked prefill is off: the scenario chunks prompts, as vLLM does")
    whole_prompt = settings.get("scheduler_reserve_full_isl")
    if whole_prompt is not None and _truth(whole_prompt) is False:
        found.not_modelled.append(
            f"{whole_prompt.place}: admission looks at a chunk's room only: the scenario looks at the whole prompt's"
        )
    k = _speculation(found, entries)
    _acceptance(found, entries, k)
    eager = settings.get("enforce_eager")
    if eager is not None:
        add("timing", "cuda_graphs", not _truth(eager), eager.place)
    _backend(found, entries)
    _left_out(found)
    return entries


def _card(found: _Found, entries: list[_Entry]) -> None:
    device = found.settings.get("device_name")
    if device is None:
        return
    try:
        entries.append(_Entry("", "hardware", hardware(str(device.value)).name.lower(), f"from {device.place}"))
    except UnknownName as error:
        found.warnings.append(f"{device.place}: {error}")


def _preset(found: _Found, entries: list[_Entry]) -> None:
    version = found.version
    if version is None:
        return
    numbers = [int(part) for part in str(version.value).split(".")[:2] if part.isdigit()]
    if len(numbers) < 2:
        found.warnings.append(f"{version.place}: vLLM {version.value}: not a version; {DEFAULT_PRESET} is taken")
        return
    releases = sorted((tuple(map(int, name.removeprefix("vllm-").split("."))), name) for name in VLLM_PRESETS)
    older = [(release, name) for release, name in releases if release <= tuple(numbers)]
    release, name = older[-1] if older else releases[0]
    note = f"vLLM {version.value}"
    if release != tuple(numbers):
        note += f"; no preset follows that release, and this is the nearest {'before' if older else 'after'} it"
        found.warnings.append(f"{version.place}: vLLM {version.value} ran; the nearest preset is {name}")
    entries.append(_Entry("engine", "preset", name, f"from {version.place}: {note}"))


def _num_gpu_blocks(found: _Found) -> tuple[int, str, str] | None:
    """Blocks, where they come from, and how they were worked out."""
    settings = found.settings
    tokens = settings.get("kv_cache_tokens")
    for name in ("num_gpu_blocks", "num_gpu_blocks_override"):
        if name in settings and (tokens is None or name == "num_gpu_blocks"):
            return _whole(settings[name]), settings[name].place, ""
    if tokens is None:
        return None
    size = _whole(settings["block_size"]) if "block_size" in settings else 16
    note = f"{tokens.value:,} tokens in blocks of {size}"
    longest = settings.get("max_model_len")
    if "one_line" in settings and longest is not None and (length := _length(longest)):
        # vLLM 0.32 prints int(blocks / ceil(length / size) * length).
        per_request = -(-length // size)
        blocks = round(tokens.value * per_request / length)
        while int(blocks / per_request * length) < tokens.value:
            blocks += 1
        return blocks, tokens.place, note
    return tokens.value // size, tokens.place, note


def _from_bytes(found: _Found, entries: list[_Entry], scenario: Scenario, asked: set[str]) -> list[_Entry]:
    """The number of blocks, from bytes of KV, where no better source has it."""
    if "engine.num_gpu_blocks" in asked or any(entry.key == "num_gpu_blocks" for entry in entries):
        return []
    setting = found.settings.get("kv_cache_memory_bytes")
    if setting is not None:
        amount = _whole(setting)
    else:
        setting = found.settings.get("available_kv_cache_gib")
        if setting is None:
            return []
        amount = int(float(setting.value) * (1 << 30))
    blocks = blocks_in(scenario, amount)
    return [_Entry("engine", "num_gpu_blocks", blocks, f"from {setting.place}: as many as fit {amount:,} bytes")]


def _speculation(found: _Found, entries: list[_Entry]) -> int | None:
    """Writes `speculative_config`; returns K, None without speculation."""
    if not found.speculation:
        return None
    asked: dict[str, Any] = {}
    place = ""
    for part, where in found.speculation:
        for key, value in part.items():
            if key in asked and not _same(asked[key], value):
                found.warnings.append(f"speculative_config.{key}: {where} says {value!r}, which counts before {place}")
        asked |= part
        place = where
    method = asked.get("method")
    if method in (None, "None"):
        named = str(asked.get("model", "")).lower()
        guess = next((kind for kind in ("eagle3", "eagle", "mtp") if kind in named.replace("-", "")), None)
        guess = guess or ("ngram" if named == "[ngram]" else "draft_model")
        asked["method"] = method = guess
        found.warnings.append(f"{place}: speculative_config has no method; by its model it is taken for {guess}")
    if isinstance(method, str) and method.endswith("_mtp"):
        asked["method"] = method = "mtp"
    if method not in _METHODS:
        found.not_modelled.append(
            f"{place}: speculative method {method}: known here: {', '.join(_METHODS)}; the scenario has none"
        )
        return None
    k = asked.get("num_speculative_tokens")
    if k is None and method == "mtp":
        k = asked["num_speculative_tokens"] = 1
        found.warnings.append(f"{place}: speculative_config has no num_speculative_tokens; 1 is taken")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ImportFailed(f"{place}: num_speculative_tokens = {k!r}: must be a whole number, 1 or more")
    for key in list(asked):
        if key not in _SPECULATION_KEYS or asked[key] is None:
            value = asked.pop(key)
            if value is not None and value is not False and key not in ("enforce_eager", "quantization", "revision"):
                found.not_modelled.append(f"{place}: speculative_config.{key} = {value!r}: not in the scenario")
            elif value not in (None, False):
                found.ignored.append(f"{place}: speculative_config.{key} = {value!r}")
    model = asked.get("model")
    if method.startswith("ngram"):
        asked.pop("model", None)
    elif isinstance(model, str) and method != "draft_model" and not Path(model).exists() and model.count("/") > 1:
        asked.pop("model")
        found.warnings.append(f"{place}: the drafter {model} is not here; the one known for the model is taken")
    ordered: dict[str, Any] = {key: asked[key] for key in ("method", "model", "num_speculative_tokens") if key in asked}
    ordered |= {key: value for key, value in asked.items() if key not in ordered}
    entries.append(_Entry("engine", "speculative_config", ordered, f"from {place}"))
    return k


def _acceptance(found: _Found, entries: list[_Entry], k: int | None) -> None:
    names = found.acceptance or found.acceptance_in_logs
    if k is None:
        if found.acceptance and not names[0].startswith("length="):
            read_sources(names)  # what is malformed is told of all the same
        if names or found.acceptance_file:
            found.warnings.append("an acceptance source was given, and the server does not speculate: it is left out")
        return
    if found.acceptance_file is not None:
        section, place = found.acceptance_file
        entries.append(_Entry("", "acceptance", section, f"from {place}"))
        return
    if not names:
        return
    one_k = k if any(name.startswith("length=") for name in names) else None
    source = read_sources(names, one_k)
    evidence = source.evidence
    model = "per_position"
    if evidence.k < k or (isinstance(evidence, Figures) and evidence.rates is None):
        model = "geometric"
        if evidence.k < k:
            found.warnings.append(
                f"{names[0]}: drafts were {evidence.k} a step and the server has {k}: one rate is taken for all"
            )
    elif evidence.k > k:
        found.warnings.append(f"{names[0]}: drafts were {evidence.k} a step and the server has {k}")
    section = dict(fit(model, evidence, held_out=False).section)
    note = "a rate for each position" if model == "per_position" else "one rate, by the mean length"
    if isinstance(evidence, Steps):
        note += "; `speckv acceptance fit` compares models that know requests and bursts"
    entries.append(_Entry("", "acceptance", section, f"from {', '.join(names)} ({source.kind}): {note}"))
    found.warnings.extend(f"{names[0]}: {text}" for text in source.notes)


def _backend(found: _Found, entries: list[_Entry]) -> None:
    setting = found.settings.get("attention_backend")
    if setting is None or str(setting.value).lower() in ("auto", "none", "flash_attn"):
        return
    if str(setting.value).lower() == "flashinfer":
        entries.append(_Entry("timing", "attention_kernel", "flashinfer", f"from {setting.place}"))
    else:
        found.not_modelled.append(
            f"{setting.place}: attention_backend {setting.value}: costs are those of the card's own"
        )


def _left_out(found: _Found) -> None:
    for name, setting in found.settings.items():
        if name in _READ_ELSEWHERE:
            continue
        shown = setting.place if setting.place.rpartition(" ")[2].startswith("-") else f"{setting.place}: {name}"
        if setting.value not in (True, "true"):
            shown += f" {str(setting.value)[:60]}"
        reason = _NOT_MODELLED.get(name)
        if reason is not None:
            off = name.endswith("_size") and not name.startswith("kv_") and setting.value in _ONES
            if not off and setting.value not in _OFF:
                found.not_modelled.append(f"{shown}: {reason}")
        elif name in KNOWN_FLAGS:
            found.ignored.append(f"{shown}: no meaning here")
        else:
            found.ignored.append(f"{shown}: not known")
            found.warnings.append(f"{shown}: not a flag that is known; it is left out")


def _workload(found: _Found, folder: Path) -> list[_Entry]:
    if found.trace is None:
        return []
    path, told = found.trace
    if told["format"] != "sharegpt":
        columns = None
        if "columns" in told:
            from workloads.traces import Columns

            named = told["columns"]
            columns = Columns(named["arrival"], named["prompt_tokens"], named["output_tokens"], named["unit"])
        Trace(path, told["format"], max_requests=_LOOKED_AT, columns=columns).check()
    shown = os.path.relpath(path, folder)
    section = {"trace": {"path": shown, **told}}
    if told["format"] == "sharegpt":
        section["trace"]["arrivals"] = {"process": "poisson", "rate": 4.0}
        return [
            _Entry("", "workload", section, f"from {path}; it has no times: assumed: 4 conversations begin a second")
        ]
    return [_Entry("", "workload", section, f"from {path}")]


def _with_overrides(entries: list[_Entry], asked: set[str], resolved: dict[str, Any]) -> list[_Entry]:
    """Entries with what `--set` says in their place; a key below another rewrites the whole of it."""
    for text in sorted(asked):
        parts = text.split(".")
        section = parts[0] if parts[0] in ("engine", "timing") and len(parts) > 1 else ""
        key = parts[1] if section else parts[0]
        value = resolved[section][key] if section else resolved[key]
        entry = next((entry for entry in entries if (entry.section, entry.key) == (section, key)), None)
        if entry is None:
            entry = _Entry(section, key, value, "")
            entries.append(entry)
        entry.value, entry.comment = _without_nulls(value), "from --set"
    return entries


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _add_assumed(entries: list[_Entry], resolved: dict[str, Any], scenario: Scenario) -> None:
    present = {(entry.section, entry.key) for entry in entries}

    def assume(section: str, key: str, reason: str, value: Any = None) -> None:
        if (section, key) not in present:
            read = value if value is not None else resolved[section][key] if section else resolved[key]
            entries.append(_Entry(section, key, read, f"assumed: {reason}", assumed=True))

    assume("", "hardware", "no source names the card; --set hardware=NAME says it")
    assume("engine", "preset", "no source names vLLM's release")
    for key, reason in _ENGINE_DEFAULTS.items():
        assume("engine", key, reason)
    if ("engine", "num_gpu_blocks") not in present:
        assume(
            "engine", "gpu_memory_utilization", "vLLM's default; with the card it gives the number of blocks, estimated"
        )
    assume("engine", "speculative_config", "no source asks for speculation")
    assume("timing", "cuda_graphs", "vLLM's default")
    if scenario.engine.speculative_config is not None:
        speculation = scenario.engine.speculative_config
        told = speculation.rejection_sample_method == "synthetic"
        value = _without_nulls(resolved["acceptance"])
        if told and ("", "acceptance") not in present:
            entries.append(_Entry("", "acceptance", value, "from speculative_config: synthetic acceptance"))
        else:
            assume("", "acceptance", "no source says what is accepted; a published figure for the method", value)
    if ("", "workload") not in present:
        synthetic = _without_nulls(resolved["workload"]["synthetic"])
        kept = {key: synthetic[key] for key in ("num_requests", "arrivals", "prompt_tokens", "output_tokens")}
        assume("", "workload", "no trace was given; speckv's default requests", {"synthetic": kept})


_TOP: Final = ("name", "model", "hardware", "engine", "timing", "acceptance", "workload")


def _plain_text(entries: list[_Entry]) -> str:
    whole: dict[str, Any] = {}
    for entry in entries:
        (whole.setdefault(entry.section, {}) if entry.section else whole)[entry.key] = entry.value
    return json.dumps(whole)  # JSON is YAML


def _text(found: _Found, entries: list[_Entry], output: Path | None) -> str:
    lines = [f"# Written by speckv {__version__} (speckv import) from:"]
    lines += [f"#   {_one_line(source)}" for source in found.sources]
    lines.append("# `from` says where a value comes from, `assumed` that no source has it.")
    for title, texts in (
        ("Not modelled, though the server has it:", found.not_modelled),
        ("Without meaning here, or not known:", found.ignored),
        ("Mind:", found.warnings),
    ):
        if texts:
            lines += ["#", f"# {title}", *(f"#   {_short(found, text)}" for text in dict.fromkeys(texts))]
    lines.append("")
    order = ["preset", *_ENGINE_DEFAULTS]
    place = order.index("block_size") + 1
    order[place:place] = ["num_gpu_blocks", "gpu_memory_utilization"]
    ranks = {key: rank for rank, key in enumerate(order)}
    for top in _TOP:
        inside = [entry for entry in entries if entry.section == top]
        if inside:
            lines.append(f"{top}:")
            for entry in sorted(inside, key=lambda entry: ranks.get(entry.key, len(ranks))):
                lines += _entry_lines(found, entry, "  ")
        lines += [
            text
            for entry in entries
            if not entry.section and entry.key == top
            for text in _entry_lines(found, entry, "")
        ]
    others = [entry for entry in entries if not entry.section and entry.key not in _TOP]
    lines += [text for entry in others for text in _entry_lines(found, entry, "")]
    return "\n".join(lines) + "\n"


def _short(found: _Found, text: str) -> str:
    for path in found.paths:
        text = text.replace(str(path), path.name)
    return _one_line(text)


def _entry_lines(found: _Found, entry: _Entry, indent: str) -> list[str]:
    """A scalar with its comment beside it; a mapping with its comment above and a key a line."""
    comment = _short(found, entry.comment)
    if not isinstance(entry.value, dict):
        return [f"{indent}{entry.key}: {_scalar(entry.value)}  # {comment}"]
    return [f"{indent}# {comment}", f"{indent}{entry.key}:", *_mapping_lines(entry.value, indent + "  ")]


def _mapping_lines(mapping: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in mapping.items():
        if isinstance(value, dict) and len(json.dumps(value)) > 80:
            lines += [f"{indent}{key}:", *_mapping_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


_PLAIN_TEXT: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/")
_NOT_TEXT: Final = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf")


def _scalar(value: Any) -> str:
    """YAML for a value: JSON, but that plain words need no quotes."""
    if isinstance(value, str) and value and set(value) <= _PLAIN_TEXT:
        if value[0].isalpha() and value.lower() not in _NOT_TEXT:
            return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_scalar(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(entry) for entry in value) + "]"
    if isinstance(value, float) and value != int(value) and "e" in repr(value):
        return f"{value:.12f}".rstrip("0")
    return json.dumps(value, ensure_ascii=True)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


# Values


def _whole(setting: Setting) -> int:
    value = setting.value
    if isinstance(value, bool):
        value = None
    elif isinstance(value, float) and value == int(value):
        value = int(value)
    elif isinstance(value, str):
        value = human_readable(value)
    if not isinstance(value, int):
        raise ImportFailed(f"{setting.place}: {setting.name} = {setting.value!r}: expected a whole number")
    return value


def _length(setting: Setting) -> int | None:
    if str(setting.value).lower() in ("auto", "-1", "none"):
        return None
    return _whole(setting)


def _number(setting: Setting) -> float:
    try:
        value = float(setting.value)
    except (TypeError, ValueError):
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ImportFailed(f"{setting.place}: {setting.name} = {setting.value!r}: expected a number")
    return value


def _truth(setting: Setting) -> bool | None:
    text = str(setting.value).lower()
    if text in ("true", "1", "yes"):
        return True
    if text in ("false", "0", "no"):
        return False
    if text in ("none", "auto"):
        return None
    raise ImportFailed(f"{setting.place}: {setting.name} = {setting.value!r}: expected true or false")
