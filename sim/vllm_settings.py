"""What a vLLM server was told: from its command line, its start-up log, a recorded configuration, or its metrics.

Knows how vLLM 0.32 spells flags (`vllm/engine/arg_utils.py`, `vllm/entrypoints/launchers/cli_args.py`) and what it
prints while it starts (`non-default args: ...`, `Initializing a V1 LLM engine (v...) with config: ...`, `GPU KV cache
size: ...`; earlier releases print the same but for what is said below). Gives settings under vLLM's names with their
places. Must not know scenarios, nor what a setting means to the simulator.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = [
    "KNOWN_FLAGS",
    "Command",
    "Setting",
    "SettingsError",
    "StartUp",
    "find_command",
    "human_readable",
    "read_cache_config",
    "read_command",
    "read_meta",
    "read_start_up",
    "text_lines",
]


class SettingsError(ValueError):
    """A command line, log or file that cannot be read. The message names the place, the value and what is allowed."""


class Setting(NamedTuple):
    """One setting. `name`: vLLM's, with underscores. `value`: text from a command line, else as it was printed."""

    name: str
    value: Any
    place: str
    """Where it stands: `server.log:12`, or the flag."""


@dataclass(frozen=True)
class Command:
    """A `vllm serve` command line."""

    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()
    """Words that are no settings."""


@dataclass(frozen=True)
class StartUp:
    """What a log or a recorded configuration says; later lines override earlier ones."""

    settings: tuple[Setting, ...]
    version: Setting | None = None
    notes: tuple[str, ...] = ()


# Flags

_ALIASES: Final = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "ep": "enable_expert_parallel",
    "q": "quantization",
    "sc": "speculative_config",
    "cc": "compilation_config",
    "ac": "attention_config",
    "O": "optimization_level",
    "n": "nnodes",
    "r": "node_rank",
    "dpn": "data_parallel_rank",
    "dpr": "data_parallel_start_rank",
    "dpl": "data_parallel_size_local",
    "dpa": "data_parallel_address",
    "dpp": "data_parallel_rpc_port",
    "dpb": "data_parallel_backend",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
    "model_tag": "model",
    "device_memory_utilization": "gpu_memory_utilization",
}

_SWITCHES: Final = frozenset(
    """
    aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
    cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb dcp_q_replicate disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_fastapi_docs disable_hybrid_kv_cache_manager disable_log_requests
    disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log
    enable_auto_tool_choice enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator enable_dbo
    enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
    enable_flashinfer_autotune enable_force_include_usage enable_hc_sp enable_layerwise_nvtx_tracing
    enable_log_deltas enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_moe_shared_loras enable_nccl_comm_suspend
    enable_offline_docs enable_per_request_metrics enable_prefix_caching enable_prompt_embeds
    enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts enable_scale_out
    enable_server_load_tracking enable_shm_tensor_arena enable_sleep_mode enable_ssl_refresh
    enable_tokenizer_info_endpoint enable_tower_connector_lora enable_trace_replay enforce_eager
    exclude_tools_when_tool_choice_none fail_on_environ_validation fully_sharded_loras grpc headless
    interleave_mm_strings jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only
    log_error_stack long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only numa_bind
    ray_workers_use_nsight return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl
    skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay
    tokens_only trust_remote_code trust_request_chat_template use_fp64_gumbel use_replayssm use_tqdm_on_load
    """.split()
)
"""Flags without a value; `--no-` before them says false."""

_SEVERAL: Final = frozenset(
    """
    allowed_headers allowed_media_domains allowed_methods allowed_origins cudagraph_capture_sizes
    custom_histogram_buckets device_ids disable_access_log_for_endpoints ignore_patterns kv_cache_dtype_skip_layers
    logits_processors lora_modules lora_target_modules middleware numa_bind_cpus numa_bind_nodes served_model_name
    """.split()
)
"""Flags with one value or more."""

_WITH_VALUE: Final = frozenset(
    """
    additional_config all2all_backend allowed_local_media_path anthropic_disabled_thinking_effort api_key
    api_server_count attention_backend attention_config aux_output_config block_size chat_template
    chat_template_content_format code_revision cohere_format collect_detailed_traces compilation_config config
    config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb
    cpu_offload_params data_parallel_address data_parallel_backend data_parallel_rank data_parallel_rpc_port
    data_parallel_size data_parallel_size_local data_parallel_start_rank data_parallel_supervisor_port
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    decode_context_parallel_size default_chat_template_kwargs default_mm_loras diffusion_config
    distributed_executor_backend distributed_timeout_seconds download_dir dp_supervisor_probe_failure_threshold
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_sync_interval dtype ec_manager_config
    ec_transfer_config elastic_ep_max_dp_size engram_config eplb_config expert_placement_strategy
    fault_tolerance_config fingerprint_mode fingerprint_value gdn_prefill_backend generation_config
    gpu_memory_utilization grpc_port h11_max_header_count h11_max_incomplete_event_size hf_config_path hf_overrides
    hf_token host io_processor_plugin ir_op_priority jit_monitor_mode kda_decode_backend kda_prefill_backend
    kernel_config kv_cache_dtype kv_cache_memory_bytes kv_cache_metrics_sample kv_events_config
    kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt linear_backend load_format
    log_config_file log_level logging_config logprobs_mode long_prefill_token_threshold lora_dtype mamba_backend
    mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype
    mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size max_log_len max_logprobs
    max_lora_cls_labels max_lora_rank max_loras max_model_len max_num_active_seqs max_num_batched_tokens
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers
    media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
    mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
    mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl model_loader_extra_config
    moe_backend nnodes node_rank num_gpu_blocks_override num_scheduler_steps offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
    override_generation_config per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    port prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization quantization_config
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
    response_role revision root_path runner safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_cls scheduling_policy seed show_hidden_metrics_for_version
    shutdown_timeout sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
    speculative_config sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
    stream_interval structured_outputs_config swap_space tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_revision tool_call_parser tool_parser_plugin tool_server tool_strict_level ubatch_size uds
    uvicorn_log_level video_pruning_method video_pruning_rate watermark watermark_config weight_transfer_config
    worker_cls worker_extension_cls
    """.split()
)

KNOWN_FLAGS: Final = _SWITCHES | _SEVERAL | _WITH_VALUE
"""Names of all flags of `vllm serve` 0.32 that are known here, and of a few that earlier releases had."""

_SECRET: Final = ("api_key", "hf_token", "watermark_config")
_START: Final = re.compile(
    r"(?<![\w./-])(?:\S*/)?vllm\s+serve\b|vllm\.entrypoints\.openai\.api_server\b|\S*vllm/vllm-openai\S*"
)
_VERSION: Final = r"[0-9]+\.[0-9]+(?:\.[0-9]+)?[^\s)]*"


def find_command(text: str) -> bool:
    """Whether a `vllm serve` command line stands somewhere in the text, outside comments."""
    return _start_of(text) is not None


def _start_of(text: str) -> re.Match[str] | None:
    for found in _START.finditer(text):
        line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if not line.lstrip().startswith("#"):
            return found
    return None


def read_command(text: str, place: str, *, numbered: bool = False) -> Command:
    """The settings of the first `vllm serve` (or `api_server`, or `vllm/vllm-openai` container) command in the text.

    Text that begins with `--` is taken for flags alone. `numbered`: the text is a file's, so that places have lines.
    Flags may have dashes or underscores, and values may follow a blank or `=`. Raises SettingsError.
    """
    begun = 0
    if not text.lstrip().startswith("-"):
        found = _start_of(text)
        if found is None:
            raise SettingsError(f"{place}: no `vllm serve` command")
        begun = found.end()
    others = 0 if begun == 0 else len(_START.findall(text[begun:]))
    words = _words(text, begun, place, numbered)
    notes = [f"{place}: further commands in it are not read"] if others else []
    settings: list[Setting] = []
    number = 0
    while number < len(words):
        word, where = words[number]
        number += 1
        if not word.startswith("-") or re.fullmatch(r"-\d+(\.\d+)?", word):
            if any(setting.name == "model" for setting in settings):
                notes.append(f"{where}: {word!r} is no flag and no flag's value")
            else:
                settings.append(Setting("model", word, f"{where} (the model)" if numbered else f"{where}, the model"))
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("--"):
            optimisation = re.fullmatch(r"-O(\d)", flag)
            if optimisation is not None:
                name, equals, value = "optimization_level", "=", optimisation[1]
        head, dot, below = name.partition(".")
        head = _ALIASES.get(head, head)
        shown = f"{where}: {flag}" if numbered else f"{where}, {flag}"
        if head in _SWITCHES or (head.startswith("no_") and head[3:] in _SWITCHES):
            if equals:
                settings.append(Setting(head, value, shown))
            elif head in _SWITCHES:
                settings.append(Setting(head, "true", shown))
            else:
                settings.append(Setting(head[3:], "false", shown))
            continue
        if not equals:
            values = []
            while number < len(words) and not _is_flag(words[number][0]):
                values.append(words[number][0])
                number += 1
                if head not in _SEVERAL:
                    break
            if not values and head in KNOWN_FLAGS:
                raise SettingsError(f"{shown}: has no value")
            value = " ".join(values)
        if head in _SECRET:
            value = "***"
        settings.append(Setting(f"{head}{dot}{below}", value, shown))
    if not settings:
        raise SettingsError(f"{place}: the command has neither a model nor a flag")
    return Command(tuple(settings), tuple(notes))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _words(text: str, begin: int, place: str, numbered: bool) -> list[tuple[str, str]]:
    """The words of one shell command from `begin` to its end, each with its place. Raises SettingsError."""
    words: list[tuple[str, str]] = []
    word: list[str] | None = None
    line = text.count("\n", 0, begin) + 1
    word_line = line
    quote = ""
    quote_line = line
    at = begin
    # A container's command may be the value of something quoted around it; a quote that closes there ends it.
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\n":
            line += 1
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and at < len(text) and text[at] in '"\\$`':
                assert word is not None
                word.append(text[at])
                at += 1
            else:
                assert word is not None
                word.append(char)
            continue
        if char == "\\":
            ahead = re.compile(r"[ \t]*\r?\n").match(text, at)
            if ahead is not None:
                at = ahead.end()
                line += 1
                continue
            if at < len(text):
                word, word_line = (word, word_line) if word is not None else ([], line)
                word.append(text[at])
                at += 1
            continue
        if char in "'\"":
            quote, quote_line = char, line
            word, word_line = (word, word_line) if word is not None else ([], line)
            continue
        if char in " \t\r\n;&|<>" or (char == "#" and word is None):
            if word is not None and not (char in "<>" and "".join(word).isdigit()):
                words.append(("".join(word), f"{place}:{word_line}" if numbered else place))
            word = None
            if char not in " \t\r":
                break
            continue
        word, word_line = (word, word_line) if word is not None else ([], line)
        word.append(char)
    else:
        if word is not None:
            words.append(("".join(word), f"{place}:{word_line}" if numbered else place))
    if quote:
        raise SettingsError(f"{place}:{quote_line}: a quote {quote} is opened and never closed")
    return words


def human_readable(text: str) -> int | None:
    """`8192`, `8k` (8,000) or `8K` (8,192) as vLLM reads them; None for anything else."""
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip().replace("_", ""))
    if found is None or ("." in found[1] and not found[2].islower()):
        return None
    step = 1000 if found[2].islower() else 1024
    return int(float(found[1]) * step ** ("kmgt".index(found[2].lower()) + 1)) if found[2] else int(found[1])


# Files


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a plain or gzipped text with their numbers, colours taken out. Raises SettingsError."""
    if path.exists() and not path.is_file():
        raise SettingsError(f"{path}: is not a regular file")
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if number == 1:
                    text = text.removeprefix("\ufeff")
                yield number, _COLOUR.sub("", text) if "\x1b" in text else text
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, zlib.error) as error:
        raise SettingsError(f"{path}: a damaged archive ({error})") from None


_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_ARGS: Final = re.compile(r"non-default args: (.*)$")
_CONFIG: Final = re.compile(rf"Initializing an? (?:V1 )?LLM engine \(v({_VERSION})\) with config: (.*)$")
_SERVER: Final = re.compile(rf"vLLM (?:API )?server version ({_VERSION})(?:, serving model (\S+))?")
_LOGO: Final = re.compile(rf"^[^\w]*█[^\w]*version +({_VERSION})\s*$")
_SIZE: Final = re.compile(
    r"(GPU(?: \+ host)?|CPU|XPU|TPU) KV cache size: ([0-9,]+) tokens"
    r"(?:, Maximum concurrency for ([0-9,]+) tokens per request)?"
)
_BLOCKS: Final = re.compile(r"# (?:GPU|cuda) blocks: ([0-9]+)|num_gpu_blocks is: ([0-9]+)")
_OVERRIDE: Final = re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)")
_LENGTH: Final = re.compile(r"(?:Using max model len|Maximum concurrency for) ([0-9,]+)")
_BATCHED: Final = re.compile(r"max_num_batched_tokens=(\d+)")
_AVAILABLE: Final = re.compile(r"Available KV cache memory: ([0-9.]+) GiB")
_MARKS: Final = (
    "non-default args:",
    "LLM engine (v",
    "KV cache size:",
    "server version",
    "version",
    "blocks: ",
    "num_gpu_blocks",
    "max model len",
    "Maximum concurrency",
    "max_num_batched_tokens=",
    "Available KV cache memory",
    "Asynchronous scheduling",
)


def read_start_up(path: Path) -> StartUp:
    """What a server's log says about its settings. Of several starts in one log the last counts.

    Besides vLLM's own names there may be `kv_cache_tokens` (with `one_line`, which tells how they are counted),
    `num_gpu_blocks` and `available_kv_cache_gib`. Raises SettingsError for a line of settings that is cut or malformed.
    """
    settings: dict[str, Setting] = {}
    version: Setting | None = None
    starts = 0
    sizes: set[str] = set()
    for number, line in text_lines(path):
        if not any(mark in line for mark in _MARKS):
            continue
        place = f"{path}:{number}"

        def put(name: str, value: Any, place: str = place) -> None:
            settings[name] = Setting(name, value, place)

        if (found := _ARGS.search(line)) is not None:
            starts += 1
            settings.clear()
            sizes.clear()
            for name, value in _arguments(found[1], place).items():
                put(_ALIASES.get(name, name), value)
        elif (found := _CONFIG.search(line)) is not None:
            version = Setting("version", found[1], place)
            for name, value in _resolved(found[2], place).items():
                if name == "speculative_config" and isinstance(settings.get(name, Setting("", None, "")).value, dict):
                    continue  # what was asked says more than what is printed of it
                put(name, value)
        elif (found := _SERVER.search(line)) is not None:
            version = Setting("version", found[1], place)
            if found[2]:
                put("model", found[2])
        elif (found := _LOGO.search(line)) is not None:
            version = Setting("version", found[1], place)
        elif (found := _SIZE.search(line)) is not None:
            tokens = int(found[2].replace(",", ""))
            sizes.add(found[2])
            put("kv_cache_tokens", tokens)
            if found[3]:
                put("one_line", True)
                put("max_model_len", int(found[3].replace(",", "")))
        elif (found := _OVERRIDE.search(line)) is not None:
            put("num_gpu_blocks", int(found[1]))
        elif (found := _BLOCKS.search(line)) is not None:
            put("num_gpu_blocks", int(found[1] or found[2]))
        elif (found := _LENGTH.search(line)) is not None:
            put("max_model_len", int(found[1].replace(",", "")))
        elif (found := _AVAILABLE.search(line)) is not None:
            put("available_kv_cache_gib", float(found[1]))
        elif "Asynchronous scheduling is" in line:
            put("async_scheduling", "is enabled" in line)
        elif "hunked prefill is enabled" in line and (found := _BATCHED.search(line)) is not None:
            put("max_num_batched_tokens", int(found[1]))
    notes = []
    if starts > 1:
        notes.append(f"{path}: the server was started {starts} times; the last start counts")
    if len(sizes) > 1:
        notes.append(f"{path}: KV cache sizes of {', '.join(sorted(sizes))} tokens; the last counts")
    if not settings:
        raise SettingsError(
            f"{path}: holds no setting; of a start-up log read are `non-default args: ...`, `Initializing a V1 "
            "LLM engine ... with config: ...`, `GPU KV cache size: ... tokens`"
        )
    return StartUp(tuple(settings.values()), version, tuple(notes))


def _arguments(text: str, place: str) -> dict[str, Any]:
    """A Python dictionary as printed; values that are objects stay text."""
    text = text.strip()
    try:
        read = ast.literal_eval(text)
        if isinstance(read, dict):
            return {str(name).replace("-", "_"): value for name, value in read.items()}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if not (text.startswith("{") and text.endswith("}")):
        raise SettingsError(f"{place}: `non-default args:` is cut or malformed: expected {{'name': value, ...}}")
    result = {}
    for part in _split(text[1:-1], place):
        name, colon, value = part.partition(":")
        key = name.strip().strip("'\"")
        if not colon or not key.isidentifier():
            raise SettingsError(f"{place}: `non-default args:` is malformed at {part.strip()[:60]!r}")
        result[key] = _value(value.strip())
    return result


def _resolved(text: str, place: str) -> dict[str, Any]:
    """The settings of vLLM's printed configuration that matter; `name=value, ...`."""
    wanted = {
        "max_seq_len": "max_model_len",
        **{name: name for name in ("model", "dtype", "quantization", "enforce_eager", "kv_cache_dtype")},
        **{name: name for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")},
        **{name: name for name in ("decode_context_parallel_size", "enable_prefix_caching", "enable_chunked_prefill")},
        "speculative_config": "speculative_config",
    }
    result = {}
    for part in _split(text, place):
        name, equals, value = part.partition("=")
        if equals and name.strip() in wanted:
            result[wanted[name.strip()]] = _value(value.strip())
    if not result:
        raise SettingsError(f"{place}: the configuration that was printed is cut or malformed: expected model=..., ...")
    spec = result.get("speculative_config")
    if isinstance(spec, str):
        found = re.fullmatch(r"SpeculativeConfig\((.*)\)", spec)
        if found is None:
            raise SettingsError(f"{place}: speculative_config={spec[:60]}: expected SpeculativeConfig(...) or None")
        fields = dict(part.strip().partition("=")[::2] for part in _split(found[1], place))
        names = {"method": "method", "model": "model", "num_spec_tokens": "num_speculative_tokens"}
        result["speculative_config"] = {
            names[name]: value
            for name, text_value in fields.items()
            if name in names and (value := _value(text_value)) is not None
        }
    return result


def _split(text: str, place: str) -> list[str]:
    """Parts between the commas that stand in no bracket and no quote. Raises SettingsError where one stays open."""
    parts: list[str] = []
    depth, quote, begun, at = 0, "", 0, 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(text[begun:at])
            begun = at + 1
        at += 1
    if quote or depth > 0:
        raise SettingsError(
            f"{place}: the line is cut: a bracket or quote in {text[begun : begun + 40].strip()!r} stays open"
        )
    parts.append(text[begun:])
    return [part for part in parts if part.strip()]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def read_meta(path: Path, recorded: dict[str, Any]) -> StartUp:
    """Settings of a run recorded with its configuration (LLMServingSim's `meta.json`: resolved_config, kv_cache)."""
    place = str(path)
    config = recorded.get("resolved_config")
    if not isinstance(config, dict):
        raise SettingsError(f"{place}: resolved_config: expected an object, as a recorded run has")
    settings: dict[str, Setting] = {}

    def put(name: str, section: Any, key: str, shown: str) -> None:
        if isinstance(section, dict) and section.get(key) is not None:
            settings[name] = Setting(name, section[key], f"{place}: {shown}.{key}")

    for name, section, key in (
        ("model", "model_config", "model"),
        ("dtype", "model_config", "dtype"),
        ("quantization", "model_config", "quantization"),
        ("enforce_eager", "model_config", "enforce_eager"),
        ("max_model_len", "model_config", "max_model_len"),
        ("block_size", "cache_config", "block_size"),
        ("kv_cache_dtype", "cache_config", "cache_dtype"),
        ("enable_prefix_caching", "cache_config", "enable_prefix_caching"),
        ("gpu_memory_utilization", "cache_config", "gpu_memory_utilization"),
        ("num_gpu_blocks", "cache_config", "num_gpu_blocks"),
        ("sliding_window", "cache_config", "sliding_window"),
        ("tensor_parallel_size", "parallel_config", "tensor_parallel_size"),
        ("pipeline_parallel_size", "parallel_config", "pipeline_parallel_size"),
        ("data_parallel_size", "parallel_config", "data_parallel_size"),
        ("async_scheduling", "scheduler_config", "async_scheduling"),
        ("enable_chunked_prefill", "scheduler_config", "enable_chunked_prefill"),
        ("long_prefill_token_threshold", "scheduler_config", "long_prefill_token_threshold"),
        ("max_num_batched_tokens", "scheduler_config", "max_num_batched_tokens"),
        ("max_num_seqs", "scheduler_config", "max_num_seqs"),
        ("scheduling_policy", "scheduler_config", "policy"),
        ("enable_lora", "", "lora_config"),
        ("kv_transfer_config", "", "kv_transfer_config"),
        ("speculative_config", "", "speculative_config"),
    ):
        put(name, config.get(section) if section else config, key, f"resolved_config{'.' if section else ''}{section}")
    put("device_name", recorded.get("hardware"), "device_name", "hardware")
    text = recorded.get("vllm_version")
    version = Setting("version", text, f"{place}: vllm_version") if isinstance(text, str) else None
    return StartUp(tuple(settings.values()), version)


_INFO: Final = re.compile(r"vllm:cache_config_info\{(.*)\}\s+\S+")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_cache_config(lines: Sequence[tuple[int, str]], path: Path) -> StartUp:
    """What the gauge `vllm:cache_config_info` of a metrics scrape says; no settings where there is none."""
    settings = {}
    wanted = ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching", "sliding_window")
    for number, line in lines:
        found = _INFO.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found[1]))
        labels["kv_cache_dtype"] = labels.get("cache_dtype", "None")
        for name in (*wanted, "kv_cache_dtype"):
            text = labels.get(name, "None")
            if text not in ("None", ""):
                settings[name] = Setting(name, text, f"{path}:{number}")
    return StartUp(tuple(settings.values()))


def read_json_object(path: Path) -> Any:
    """A whole JSON file. Raises SettingsError with the line."""
    text = "\n".join(line for _, line in text_lines(path))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{path}:{error.lineno}: malformed JSON ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise SettingsError(f"{path}:1: malformed JSON (nested too deep)") from None
