"""Times a machine's kernels at a model's shapes and writes a table as it goes: `speckv calibrate measure`.

Knows tensors, clocks and the table's columns. Must not know models, calibrations or the terminal: shapes come in as
numbers, words go out through `say`.

On CUDA with events, after warm-up, the median of several repeats; weights and caches take turns, so that none is found
in the cache that the repeat before has left. On a CPU with a wall clock: that tries the whole way, and says nothing
about a GPU. What is measured is written at once, so that an interrupt keeps it.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import torch
from torch import Tensor

from gpu_backend.attention import RaggedBatch, fast_path_missing, paged_attention
from gpu_backend.paged_cache import PagedCache, block_table, slot_mapping

__all__ = ["COLUMNS", "MeasureError", "Outcome", "measure_machine"]

COLUMNS: Final = (
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
"""As `sim.measured_tables.OWN_COLUMNS`; a test holds them together."""

_BLOCK: Final = 16
_COLD_BYTES: Final = 256 << 20
"""Weights or KV that take turns add up to this at least: more than any card's cache."""
_SPREAD: Final = 0.25


class MeasureError(Exception):
    """The device cannot be used. The text says why and what would do."""


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    rows: int = 0
    card: str = ""
    worth: str = ""
    """What the figures are worth, in words."""
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False


Case = Callable[[], Callable[[], object]]
"""Makes the tensors and returns what is to be timed."""


@dataclass(frozen=True, slots=True)
class _Task:
    values: Mapping[str, object]
    case: Case


def measure_machine(
    out: Path,
    *,
    device: str,
    model: str,
    linears: Mapping[str, tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    budget_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measure until everything is done or `budget_s` is spent, kind by kind in turn, into the table `out`.

    Args:
        out: the table (CSV); overwritten.
        device: `cpu`, `cuda` or `cuda:N`.
        model: what the shapes are called.
        linears: (outputs, inputs) of a layer's matrices on one rank, and `lm_head`.
        heads, kv_heads, head_dim: of one rank.

    Raises:
        MeasureError: no such device, no driver, or the table cannot be written.
    """
    where = _device(device)
    outcome = Outcome()
    if where.type == "cuda":
        outcome.card = torch.cuda.get_device_name(where)
        free, total = torch.cuda.mem_get_info(where)
        if free < 0.9 * total:
            held = (total - free) / 1e9
            outcome.warnings.append(f"{held:.1f} GB of {device} are held by something else: times may be disturbed")
        missing = fast_path_missing(torch.zeros(1, heads, head_dim, dtype=torch.bfloat16, device=where))
        kernel = "the fast path of gpu_backend" if missing is None else f"the plain reference ({missing})"
        outcome.worth = f"measured on this card; attention by {kernel}, not by the kernels that vLLM runs"
        if missing is not None:
            outcome.warnings.append(f"attention is timed with the plain reference: {missing}")
    else:
        outcome.card = "CPU"
        free = 4 << 30
        outcome.worth = "a CPU's times: they try the way from table to calibration, and say nothing about any GPU"
        outcome.warnings.append(outcome.worth)
    bench = _Bench(where, linears, heads, kv_heads, head_dim, int(free * 0.35))
    try:
        file = out.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise MeasureError(f"cannot write {out}: {error.strerror or error}") from None
    with file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        fixed: dict[str, object] = {"card": outcome.card, "model": model, "dtype": "bfloat16"}
        fixed |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        try:
            _run(bench, writer, file, fixed, time.monotonic() + budget_s, outcome, say)
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


def _device(name: str) -> torch.device:
    try:
        where = torch.device(name)
    except RuntimeError:
        raise MeasureError(f"--device {name}: is no device; allowed: cpu, cuda, cuda:0 and so on") from None
    if where.type not in ("cpu", "cuda"):
        raise MeasureError(f"--device {name}: allowed: cpu, cuda, cuda:0 and so on")
    if where.type == "cpu":
        return where
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA driver answers"
        raise MeasureError(f"--device {name}: {built}; install a CUDA build of torch and a driver, or use --device cpu")
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        raise MeasureError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _run(
    bench: _Bench,
    writer: csv.DictWriter[str],
    file: TextIO,
    fixed: Mapping[str, object],
    until: float,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    kinds = {kind: iter(tasks) for kind, tasks in bench.tasks().items()}
    skipped: dict[str, int] = {}
    wavering = 0
    spent: dict[str, float] = dict.fromkeys(kinds, 0.0)
    while kinds:
        # The kind that has had the least time is next, so that a short budget has something of each.
        kind = min(kinds, key=lambda name: spent[name])
        task = next(kinds[kind], None)
        if task is None:
            del kinds[kind]
            continue
        began = time.monotonic()
        if began >= until:
            outcome.warnings.append("the budget is spent; not everything was measured")
            break
        try:
            times = bench.time(task.case)
        except (torch.cuda.OutOfMemoryError, MemoryError):
            skipped[kind] = skipped.get(kind, 0) + 1
            bench.free()
            continue
        except RuntimeError as error:
            if "memory" in str(error).lower():
                skipped[kind] = skipped.get(kind, 0) + 1
            else:  # one kind that fails is no reason to lose the others
                outcome.warnings.append(f"{kind}: left out from here on: {str(error).splitlines()[0][:200]}")
                del kinds[kind]
            bench.free()
            continue
        finally:
            spent[kind] += time.monotonic() - began
        middle = statistics.median(times)
        wavering += len(times) > 4 and statistics.quantiles(times, n=4)[2] > (1 + _SPREAD) * middle
        writer.writerow({**fixed, "kind": kind, **task.values, "us": f"{middle:.3f}", "repeats": len(times)})
        file.flush()
        outcome.rows += 1
        if outcome.rows % 25 == 0:
            say(f"{outcome.rows} measured")
    for kind, count in skipped.items():
        outcome.warnings.append(f"{kind}: {count} sizes left out, they do not fit the memory")
    if outcome.rows and wavering > outcome.rows / 5:
        outcome.warnings.append("one time in five and more wavers by a quarter: something else runs on the device")


class _Bench:
    """Makes cases and times them."""

    def __init__(
        self,
        device: torch.device,
        linears: Mapping[str, tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_bytes: int,
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._linears = linears
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._kv_bytes = kv_bytes
        self._caches: dict[int, PagedCache] = {}
        self._matrices: dict[tuple[int, int], list[Tensor]] = {}
        self._generator = torch.Generator().manual_seed(0)

    def free(self) -> None:
        """Give memory back after a size that did not fit."""
        self._caches.clear()
        self._matrices.clear()
        if self.cuda:
            torch.cuda.empty_cache()

    def time(self, case: Case) -> list[float]:
        """Microseconds of each repeat."""
        run = case()
        for _ in range(3 if self.cuda else 1):
            run()
        if not self.cuda:
            times: list[float] = []
            began = time.monotonic()
            while len(times) < 3 or (len(times) < 9 and time.monotonic() - began < 0.05):
                start = time.perf_counter()
                run()
                times.append(1e6 * (time.perf_counter() - start))
            return times
        torch.cuda.synchronize(self.device)
        times = []
        began = time.monotonic()
        while len(times) < 5 or (len(times) < 30 and time.monotonic() - began < 0.04):
            start_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start_event.record()
            run()
            end_event.record()
            end_event.synchronize()
            times.append(1e3 * start_event.elapsed_time(end_event))
        return times

    def tasks(self) -> dict[str, Iterator[_Task]]:
        """Everything there is to measure, by kind; the most telling sizes first."""
        found = {
            "linear": self._linear_tasks(),
            "decode": self._decode_tasks(1),
            "verify": self._verify_tasks(),
            "ragged": self._ragged_tasks(),
            "prefill": self._prefill_tasks(),
            "mixed": self._mixed_tasks(),
            "draft_loop": self._draft_tasks(),
            "table_update": self._table_tasks(),
            "rollback": self._rollback_tasks(),
            "compaction": self._compaction_tasks(),
            "eager": self._step_tasks(graph=False),
        }
        if self.cuda:
            found["graph"] = self._step_tasks(graph=True)
        return found

    def _random(self, *shape: int) -> Tensor:
        # A CPU is as fast on ones, and drawing takes longer than the measurement; a GPU's power depends on the values.
        if not self.cuda:
            return torch.ones(*shape, dtype=torch.bfloat16)
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    # Linear layers

    def _weights(self, n: int, k: int) -> Iterator[Tensor]:
        """Copies of a matrix that take turns; kept until another shape is asked for."""
        if (n, k) not in self._matrices:
            self._matrices.clear()
            copies = max(1, -(-_COLD_BYTES // (2 * n * k))) if self.cuda else 1
            self._matrices[n, k] = [self._random(n, k) for _ in range(copies)]
        return itertools.cycle(self._matrices[n, k])

    def _linear_tasks(self) -> Iterator[_Task]:
        rows = (
            (1, 64, 256, 16, 2048, 4, 128, 512, 8192, 32, 8, 1024, 2, 4096) if self.cuda else (1, 16, 4, 64, 2, 8, 32)
        )
        shapes = [(n, k) for name, (n, k) in self._linears.items() if self.cuda or name != "lm_head"]
        # By thirds of the rows, so that a short budget has each matrix, and each is made three times at most.
        for some, (n, k) in itertools.product((rows[:5], rows[5:10], rows[10:]), shapes):
            for m in some:
                yield _Task({"m": m, "n": n, "k": k}, partial(self._linear, m, n, k))

    def _linear(self, m: int, n: int, k: int) -> Callable[[], object]:
        weights, rows = self._weights(n, k), self._random(m, k)
        return lambda: torch.nn.functional.linear(rows, next(weights))

    # Attention

    def _cache(self, tokens: int) -> PagedCache:
        """A cache that holds so many tokens, in as many layers as the cache needs to be cold."""
        blocks = -(-tokens // _BLOCK) + 2
        size = 1 << (blocks - 1).bit_length()
        cache = self._caches.get(size)
        if cache is None:
            layer_bytes = 2 * size * _BLOCK * self._kv_heads * self._head_dim * 2
            if layer_bytes > self._kv_bytes:
                raise MemoryError(f"{layer_bytes} bytes of KV")
            self._caches.clear()
            layers = min(8, max(1, -(-_COLD_BYTES // layer_bytes)) + 1) if self.cuda else 1
            while layers > 1 and layers * layer_bytes > self._kv_bytes:
                layers -= 1
            cache = PagedCache(layers, size, _BLOCK, self._kv_heads, self._head_dim, torch.bfloat16, self.device)
            for layer in cache.layers if self.cuda else ():
                layer.normal_()
            self._caches[size] = cache
        return cache

    def _tables(self, contexts: list[int], cache: PagedCache) -> list[list[int]]:
        needed = [-(-context // _BLOCK) for context in contexts]
        order = (torch.randperm(cache.num_blocks - 1, generator=self._generator) + 1).tolist()
        tables, start = [], 0
        for count in needed:
            tables.append(order[start : start + count])
            start += count
        return tables

    def _attention(self, query_lens: list[int], contexts: list[int]) -> Callable[[], object]:
        cache = self._cache(sum(-(-context // _BLOCK) * _BLOCK for context in contexts))
        batch = RaggedBatch.of(self._tables(contexts, cache), query_lens, contexts, self.device)
        query = self._random(sum(query_lens), self._heads, self._head_dim)
        layers = itertools.cycle(cache.layers)
        scale = self._head_dim**-0.5
        return lambda: paged_attention(query, next(layers), batch, scale)

    def _decode_tasks(self, rows: int) -> Iterator[_Task]:
        batches, contexts = (
            ((16, 64, 1, 4, 256), (1024, 4096, 256, 16384)) if self.cuda else ((2, 1, 4), (64, 256, 128))
        )
        for context, batch in itertools.product(contexts, batches):
            yield self._same(batch, rows, context)

    def _same(self, batch: int, rows: int, context: int) -> _Task:
        values = {"requests": batch, "query_len": rows, "context": context}
        return _Task(values, lambda: self._attention([rows] * batch, [context] * batch))

    def _verify_tasks(self) -> Iterator[_Task]:
        if not self.cuda:
            for rows, batch in itertools.product((4, 2), (1, 4)):
                yield self._same(batch, rows, 128)
            return
        for context, batch, rows in itertools.product((4096, 1024, 16384), (16, 1, 64), (4, 8, 2, 6)):
            yield self._same(batch, rows, context)

    def _ragged_tasks(self) -> Iterator[_Task]:
        """Contexts that differ a lot, with the mean of the even batch: half of them a third, half five thirds."""
        for mean, batch, rows in itertools.product(
            (1024, 4096) if self.cuda else (128,), (16, 64) if self.cuda else (4,), (1, 4)
        ):
            contexts = [mean // 3 if number % 2 else 2 * mean - mean // 3 for number in range(batch)]
            values = {"requests": batch, "query_len": rows, "context": mean, "note": "half a third, half five thirds"}
            yield _Task(values, partial(self._attention, [rows] * batch, contexts))

    def _prefill_tasks(self) -> Iterator[_Task]:
        sizes = (
            (2048, 0),
            (512, 4096),
            (512, 0),
            (2048, 4096),
            (128, 0),
            (8192, 0),
            (128, 4096),
            (2048, 16384),
            (512, 16384),
        )
        for chunk, history in sizes if self.cuda else ((64, 0), (64, 128), (128, 0), (32, 64)):
            values = {"chunk": chunk, "history": history}
            yield _Task(values, partial(self._attention, [chunk], [history + chunk]))

    def _mixed_tasks(self) -> Iterator[_Task]:
        sizes = itertools.product((512, 2048), (16, 64), (1024, 4096)) if self.cuda else [(64, 2, 128), (64, 4, 64)]
        for chunk, batch, context in sizes:
            values = {"requests": batch, "query_len": 1, "context": context, "chunk": chunk, "history": 0}
            yield _Task(values, partial(self._attention, [1] * batch + [chunk], [context] * batch + [chunk]))

    # What speculation adds

    def _layer(self, rows: int, context: int) -> Callable[[], object]:
        """One layer's matrices and its attention on `rows` requests."""
        matrices = [self._linear(rows, n, k) for name, (n, k) in self._linears.items() if name != "lm_head"]
        attention = self._attention([1] * rows, [context] * rows)

        def run() -> None:
            for matrix in matrices:
                matrix()
            attention()

        return run

    def _draft_tasks(self) -> Iterator[_Task]:
        """K forwards of a layer one after the other, as an EAGLE head drafts."""
        for drafts, batch in itertools.product((4, 1, 2, 8), (16, 1, 64) if self.cuda else (2,)):
            context = 1024 if self.cuda else 64

            def case(drafts: int = drafts, batch: int = batch, context: int = context) -> Callable[[], object]:
                layer = self._layer(batch, context)

                def run() -> None:
                    for _ in range(drafts):
                        layer()

                return run

            values = {
                "requests": batch,
                "query_len": drafts,
                "context": context,
                "note": "query_len drafts, one layer each",
            }
            yield _Task(values, case)

    def _table_tasks(self) -> Iterator[_Task]:
        """The block tables of a step, from lists to the device."""
        for batch, context in itertools.product((64, 16, 256), (4096, 1024)):
            tables = [list(range(-(-context // _BLOCK))) for _ in range(batch)]
            yield _Task({"requests": batch, "context": context}, partial(partial, block_table, tables, self.device))

    def _rollback_tasks(self) -> Iterator[_Task]:
        """Rejected drafts taken off on the device: new lengths, and the slots of the next rows."""
        for batch, drafts in itertools.product((64, 16, 256), (3, 7)):

            def case(batch: int = batch, drafts: int = drafts) -> Callable[[], object]:
                table = block_table([list(range(256)) for _ in range(batch)], self.device)
                lengths = torch.full((batch,), 2048, dtype=torch.int64, device=self.device)
                accepted = torch.randint(0, drafts + 1, (batch,), device=self.device)
                rows = torch.arange(batch, device=self.device).repeat_interleave(drafts + 1)
                step = torch.arange(drafts + 1, device=self.device).repeat(batch)

                def run() -> Tensor:
                    kept = lengths - drafts + accepted
                    return slot_mapping(table, rows, kept[rows] + step, _BLOCK)

                return run

            yield _Task({"requests": batch, "query_len": drafts + 1}, case)

    def _compaction_tasks(self) -> Iterator[_Task]:
        """Accepted branches of token trees moved to the front, in one layer."""
        for batch, moved in itertools.product((64, 16, 256), (3, 1)):

            def case(batch: int = batch, moved: int = moved) -> Callable[[], object]:
                cache = self._cache(batch * 64)
                flat = cache.layers[0].flatten(1, 2)
                slots = torch.randperm(flat.shape[1], generator=self._generator)[: 2 * batch * moved].to(self.device)
                source, target = slots[: batch * moved], slots[batch * moved :]
                return lambda: flat.index_copy_(1, target, flat[:, source])

            yield _Task({"requests": batch, "m": batch * moved, "note": "m rows of one layer"}, case)

    def _step_tasks(self, *, graph: bool) -> Iterator[_Task]:
        """Four layers launched one by one, or replayed as a captured graph."""
        for batch in (16, 1, 64) if self.cuda else (2,):
            context = 1024 if self.cuda else 64

            def case(batch: int = batch, context: int = context) -> Callable[[], object]:
                layer = self._layer(batch, context)

                def step() -> None:
                    for _ in range(4):
                        layer()

                if not graph:
                    return step
                side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    step()
                torch.cuda.current_stream().wait_stream(side)
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    step()
                return captured.replay

            yield _Task({"requests": batch, "query_len": 1, "context": context, "note": "four layers"}, case)
