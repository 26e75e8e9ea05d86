"""Tables of measured kernel and step times, as others and `speckv calibrate measure` write them; one reader a format.

Knows file formats. Must not know calibrations or fits. All times come out in microseconds.

The formats are told by the header: aiconfigurator's linear layers (dtype, m, n, k), attention (q_len, ctx_before) and
all-reduces (num_gpus, message_size); Vidur's MLP medians (num_tokens, mlp_up_proj_ms); LLMServingSim's mixed attention
(prefill_chunk, n_decode) and dense layers (layer, tokens); our own (kind, query_len); vLLM's log lines (`Iteration(`).
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "OWN_COLUMNS",
    "AttentionPoint",
    "IterationPoint",
    "LinearPoint",
    "ReducePoint",
    "SmallPoint",
    "TableError",
    "Tables",
    "read_tables",
]

_MAX_BYTES: Final = 500_000_000

OWN_COLUMNS: Final = (
    "kind",
    "card",
    "model",
    "dtype",
    "m",
    "n",
    "k",
    "requests",
    "query_len",
    "context",
    "chunk",
    "history",
    "heads",
    "kv_heads",
    "head_dim",
    "us",
    "repeats",
    "note",
)
"""Header of the tables that `speckv calibrate measure` writes; what a kind does not use is empty."""


class TableError(ValueError):
    """A table that cannot be read. The text names the file, the line, the value and what is expected."""


class LinearPoint(NamedTuple):
    """One linear layer: m rows, n outputs, k inputs."""

    dtype: str
    m: int
    n: int
    k: int
    us: float


class AttentionPoint(NamedTuple):
    """One attention call of one layer: `decodes` requests with `query_len` rows each on contexts of `context` tokens
    (these rows included), beside `chunks` prefill chunks of `chunk` rows on histories of `history`."""

    kv_dtype: str
    decodes: int
    query_len: int
    context: float
    chunks: int
    chunk: int
    history: int
    heads: int
    kv_heads: int
    head_dim: int
    us: float


class ReducePoint(NamedTuple):
    """One all-reduce."""

    gpu: str
    tp: int
    bytes: int
    us: float


class SmallPoint(NamedTuple):
    """The small kernels of one layer (two norms, rotary embedding, activation) for so many rows, and their elements."""

    rows: int
    elements: int
    us: float


class IterationPoint(NamedTuple):
    """One iteration that vLLM logged."""

    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int
    us: float


@dataclass
class Tables:
    """What was read, by kind; `cards` are the names that files gave, `files` what was read as what."""

    linear: list[LinearPoint] = field(default_factory=list)
    attention: list[AttentionPoint] = field(default_factory=list)
    reduce: list[ReducePoint] = field(default_factory=list)
    small: list[SmallPoint] = field(default_factory=list)
    iterations: list[IterationPoint] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    files: list[tuple[Path, str]] = field(default_factory=list)
    graph_us: float = 0.0
    """What a graph replay and a cache write add to every attention time; known of aiconfigurator's decode tables."""

    def points(self) -> int:
        """Measurements in all."""
        return len(self.linear) + len(self.attention) + len(self.reduce) + len(self.small) + len(self.iterations)


def read_tables(paths: Sequence[Path]) -> Tables:
    """All files' measurements. Raises TableError for one that is missing, unknown or malformed."""
    tables = Tables()
    for path in paths:
        before = tables.points()
        format_ = _read(path, tables)
        if tables.points() == before:
            raise TableError(f"{path}: {format_}: holds no measurement")
        tables.files.append((path, format_))
    return tables


def _read(path: Path, tables: Tables) -> str:
    try:
        if not path.is_file():
            raise TableError(f"{path}: there is no such file")
        if path.stat().st_size > _MAX_BYTES:
            raise TableError(f"{path}: has {path.stat().st_size} bytes; at most {_MAX_BYTES} are read")
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TableError(f"{path}: is no UTF-8 text") from None
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, TableError):
            raise
        raise TableError(f"{path}: cannot be read: {error}") from None
    lines = text.splitlines()
    if not lines:
        raise TableError(f"{path}: is empty")
    if any("Iteration(" in line for line in lines[:2000]):
        _iterations(lines, tables)
        return "vLLM's iteration log"
    header = [name.strip() for name in next(csv.reader([lines[0]]))]
    rows = _Rows(path, header, lines)
    columns = set(header)
    if {"kind", "query_len", "us"} <= columns:
        _own(rows, tables)
        return "a table of speckv calibrate measure"
    if {"m", "n", "k", "latency_us"} <= columns:
        for row in rows:
            dtype = row.text("dtype") if "dtype" in columns else "bfloat16"
            tables.linear.append(
                LinearPoint(dtype, row.whole("m"), row.whole("n"), row.whole("k"), row.time("latency_us"))
            )
        return "aiconfigurator's linear layers"
    if {"q_len", "ctx_before", "latency_us"} <= columns:
        return _aic_attention(rows, tables)
    if {"num_gpus", "message_size", "latency_us"} <= columns:
        for row in rows:
            if row.text("backend") == "vllm_graph":
                gpu = row.text("gpu") if "gpu" in columns else ""
                point = ReducePoint(gpu, row.whole("num_gpus"), row.whole("message_size"), row.time("latency_us"))
                tables.reduce.append(point)
        return "aiconfigurator's all-reduces (vLLM's own kernel in a graph)"
    if {"num_tokens", "mlp_up_proj_ms", "attn_pre_proj_ms"} <= columns:
        _vidur(rows, tables)
        return "Vidur's medians, Llama-3-8B"
    if {"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"} <= columns:
        _mixed(rows, tables)
        return "LLMServingSim's mixed attention, Llama-3.1-8B"
    if {"layer", "tokens", "time_us"} <= columns:
        _dense(rows, tables)
        return "LLMServingSim's dense layers, Llama-3.1-8B"
    raise TableError(
        f"{path}:1: this header is not known: {', '.join(header)[:200]}; known: aiconfigurator (gemm, attention, "
        "all-reduce), Vidur's MLP, LLMServingSim's attention and dense layers, speckv's own, vLLM's iteration log"
    )


class _Row:
    def __init__(self, place: str, values: Mapping[str, str]) -> None:
        self._place = place
        self._values = values

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            raise TableError(f"{self._place}: {name}: missing")
        return value.strip()

    def number(self, name: str) -> float:
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            raise TableError(f"{self._place}: {name} = {text!r}: expected a number") from None
        if not math.isfinite(value) or value < 0:
            raise TableError(f"{self._place}: {name} = {text!r}: expected a finite number from 0 on")
        return value

    def whole(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise TableError(f"{self._place}: {name} = {value:g}: expected a whole number")
        return int(value)

    def time(self, name: str, factor: float = 1.0) -> float:
        value = self.number(name) * factor
        if value <= 0:
            raise TableError(f"{self._place}: {name} = {value:g}: expected a time above 0")
        return value

    def given(self, name: str) -> bool:
        return bool((self._values.get(name) or "").strip())


class _Rows:
    def __init__(self, path: Path, header: Sequence[str], lines: Sequence[str]) -> None:
        self._path = path
        self._header = header
        self._lines = lines

    def __iter__(self) -> Iterator[_Row]:
        for number, values in enumerate(csv.reader(self._lines[1:]), start=2):
            if not values:
                continue
            if len(values) != len(self._header):
                raise TableError(
                    f"{self._path}:{number}: {len(values)} fields; the header has {len(self._header)}: "
                    f"{','.join(values)[:80]!r}"
                )
            yield _Row(f"{self._path}:{number}", dict(zip(self._header, values, strict=True)))


def _aic_attention(rows: _Rows, tables: Tables) -> str:
    decoding = False
    for row in rows:
        rows_, before = row.whole("q_len"), row.whole("ctx_before")
        dtype = "fp8" if row.text("kv_dtype").startswith("fp8") else "bfloat16"
        heads, kv_heads, batch = row.whole("n_q_heads"), row.whole("n_kv_heads"), row.whole("batch")
        us = row.time("latency_us")
        if before:  # one token on a context: its tables hold a cache write and a graph replay
            decoding = True
            tables.attention.append(
                AttentionPoint(dtype, batch, rows_, before + rows_, 0, 0, 0, heads, kv_heads, 128, us)
            )
        else:
            tables.attention.append(AttentionPoint(dtype, 0, 0, 0, batch, rows_, before, heads, kv_heads, 128, us))
    if decoding:
        tables.graph_us = 5.0
        return "aiconfigurator's decode attention"
    return "aiconfigurator's prefill attention"


_L8_HIDDEN, _L8_MLP, _L8_HEADS, _L8_KV, _L8_DIM, _L8_VOCAB = 4096, 14_336, 32, 8, 128, 128_256


def _l8_elements(tp: int = 1) -> int:
    qkv = (_L8_HEADS + 2 * _L8_KV) * _L8_DIM // tp
    return 2 * 4 * _L8_HIDDEN + 2 * qkv + 3 * _L8_MLP // tp


def _vidur(rows: _Rows, tables: Tables) -> None:
    for row in rows:
        tp, tokens = row.whole("tp"), row.whole("num_tokens")
        qkv, mlp = (_L8_HEADS + 2 * _L8_KV) * _L8_DIM // tp, _L8_MLP // tp
        for name, n, k in (
            ("attn_pre_proj_ms", qkv, _L8_HIDDEN),
            ("attn_post_proj_ms", _L8_HIDDEN, _L8_HEADS * _L8_DIM // tp),
            ("mlp_up_proj_ms", 2 * mlp, _L8_HIDDEN),
            ("mlp_down_proj_ms", _L8_HIDDEN, mlp),
        ):
            tables.linear.append(LinearPoint("bfloat16", tokens, n, k, row.time(name, 1e3)))
        parts = ("input_layernorm_ms", "attn_rope_ms", "post_attention_layernorm_ms", "mlp_act_ms", "add_ms")
        small = sum(row.number(name) for name in parts) * 1e3
        if small > 0:
            tables.small.append(SmallPoint(tokens, _l8_elements(tp), small))


def _mixed(rows: _Rows, tables: Tables) -> None:
    for row in rows:
        decodes, chunk = row.whole("n_decode"), row.whole("prefill_chunk")
        tables.attention.append(
            AttentionPoint(
                "bfloat16",
                decodes,
                1 if decodes else 0,
                row.number("kv_decode"),
                1 if chunk else 0,
                chunk,
                row.whole("kv_prefill"),
                _L8_HEADS,
                _L8_KV,
                _L8_DIM,
                row.time("time_us"),
            )
        )


def _dense(rows: _Rows, tables: Tables) -> None:
    shapes = {
        "qkv_proj": ((_L8_HEADS + 2 * _L8_KV) * _L8_DIM, _L8_HIDDEN),
        "o_proj": (_L8_HIDDEN, _L8_HEADS * _L8_DIM),
        "gate_up_proj": (2 * _L8_MLP, _L8_HIDDEN),
        "down_proj": (_L8_HIDDEN, _L8_MLP),
        "lm_head": (_L8_VOCAB, _L8_HIDDEN),
    }
    weights = {"layernorm": 2, "rotary_emb": 1, "act_fn": 1}
    small: dict[int, dict[str, float]] = {}
    for row in rows:
        layer, tokens, us = row.text("layer"), row.whole("tokens"), row.time("time_us")
        if layer in shapes:
            tables.linear.append(LinearPoint("bfloat16", tokens, *shapes[layer], us))
        elif layer in weights:
            small.setdefault(tokens, {})[layer] = us * weights[layer]
    for tokens, parts in sorted(small.items()):
        if len(parts) == len(weights):
            tables.small.append(SmallPoint(tokens, _l8_elements(), sum(parts.values())))


def _own(rows: _Rows, tables: Tables) -> None:
    for row in rows:
        kind = row.text("kind")
        if row.given("card"):
            tables.cards.append(row.text("card"))
        if kind == "linear":
            tables.linear.append(
                LinearPoint(row.text("dtype"), row.whole("m"), row.whole("n"), row.whole("k"), row.time("us"))
            )
        elif kind in ("decode", "verify", "prefill", "mixed"):
            chunk = row.whole("chunk") if row.given("chunk") else 0
            decodes = row.whole("requests") if row.given("requests") else 0
            tables.attention.append(
                AttentionPoint(
                    row.text("dtype"),
                    decodes,
                    row.whole("query_len") if decodes else 0,
                    row.number("context") if decodes else 0.0,
                    1 if chunk else 0,
                    chunk,
                    row.whole("history") if chunk else 0,
                    row.whole("heads"),
                    row.whole("kv_heads"),
                    row.whole("head_dim"),
                    row.time("us"),
                )
            )


_ITERATION: Final = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([0-9.]+) ms"
)


def _iterations(lines: Sequence[str], tables: Tables) -> None:
    for line in lines:
        found = _ITERATION.search(line)
        if found is not None:
            context_requests, context_tokens, generation_requests, generation_tokens = map(int, found.groups()[:4])
            tables.iterations.append(
                IterationPoint(
                    context_requests,
                    context_tokens,
                    generation_requests,
                    generation_tokens,
                    1e3 * float(found.group(5)),
                )
            )
