"""One short check for a machine with a GPU: `python -m gpu_backend.gpu_check`. Under four minutes.

1. The reference against the fast path on random ragged batches, to the tolerance of the type.
2. The decoder on the GPU: speculative decoding on the paged cache equals plain decoding, token by token, in float64.
3. Attention at K + 1 = 1, 2, 4, 6, 8 rows a request, against the bandwidth of a plain read of the same bytes.
4. Peak memory.

`--device cpu` runs the same in tiny sizes: it shows that the script works and that the reference is right, and nothing
about a GPU. Knows torch and this package; prints, and writes a table where `--out` names a file.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
"""Of one layer of Llama 3.1 8B (its config.json)."""
_QUERY_LENS = (1, 2, 4, 6, 8)
_BLOCK_SIZE = 16
_SECONDS = 200.0
"""Nothing new is begun after so long."""


class CannotRun(Exception):
    """The check cannot run here; the message says why and what would help."""


def device_of(name: str) -> torch.device:
    """The device by name, once it is known to be there.

    Raises:
        CannotRun: no torch, a build of torch without CUDA, no driver or no such card.
    """
    try:
        import torch
    except ImportError:
        raise CannotRun("torch is not installed: pip install 'speckv[gpu]'") from None
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise CannotRun(f"this torch ({torch.__version__}) has no CUDA; install a build that has, or try --device cpu")
    if not torch.cuda.is_available():
        raise CannotRun(
            f"torch is built for CUDA {torch.version.cuda}, but finds no card: no NVIDIA driver, one too old for it, "
            "or CUDA_VISIBLE_DEVICES hides the card; nvidia-smi tells"
        )
    try:
        device = torch.device(name)
        torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:
        known = ", ".join(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        raise CannotRun(f"--device {name}: {error}; there are cpu, {known}") from None
    return device


class Check:
    """The check on one device. `rows` are the measurements so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._until = time.monotonic() + _SECONDS

    def run(self) -> None:
        """All parts, in order; what fails is in `failures`."""
        import torch

        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            used = properties.total_memory - torch.cuda.mem_get_info(self.device)[0]
            print(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")
            if used > 2 * 2**30:
                print(f"warning: {used / 2**30:.1f} GiB are in use already; another process will disturb the times")
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            print("on the CPU, in tiny sizes: this shows that the script works and nothing about a GPU")
        self.agreement()
        self.decoding()
        self.bandwidth()
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            print(f"peak memory: {peak:.2f} GiB")
            self.rows.append({"part": "memory", "peak_gib": round(peak, 3)})

    # Parts

    def agreement(self) -> None:
        """Reference against the fast path; on the CPU the reference in float32 against itself in float64."""
        import torch

        from gpu_backend.attention import fast_path_missing, paged_attention, reference_attention

        tolerances = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
        for dtype, tolerance in tolerances.items():
            worst, cases = 0.0, 0
            for seed in range(24 if self.on_gpu else 6):
                if self._late("agreement"):
                    return
                query, layer, batch = self._ragged(seed, dtype)
                missing = fast_path_missing(query)
                if missing is not None and self.on_gpu:
                    raise CannotRun(missing)
                expected = reference_attention(query.double(), layer.double(), batch, _HEAD_DIM**-0.5)
                for attend in (reference_attention, paged_attention):
                    mixed = attend(query, layer, batch, _HEAD_DIM**-0.5).double()
                    error = float(((mixed - expected).abs() / (1 + expected.abs())).nan_to_num(nan=9e9).max())
                    worst = max(worst, error)
                    if error > tolerance:
                        self.failures.append(f"{attend.__name__} in {dtype}, batch {seed}: off by {error:.2e}")
                cases += 1
            print(f"agreement, {dtype}: worst {worst:.1e} of {tolerance:.0e} allowed, {cases} ragged batches")
            self.rows.append({"part": "agreement", "dtype": str(dtype), "worst": worst, "allowed": tolerance})

    def decoding(self) -> None:
        """A few scenes of the decoder, sync and async, in a pool that makes them preempt each other."""
        import torch

        from gpu_backend.decoder import Decoder, DecoderShape
        from gpu_backend.run import Ask, Scene, decode
        from sim.core.settings import Settings
        from sim.policies.presets import DEFAULT_PRESET, PRESETS

        model = Decoder(DecoderShape(), 0, torch.float64, self.device)
        draw = random.Random(0)
        shared = [draw.randrange(model.shape.vocab_size) for _ in range(12)]
        asks = tuple(Ask((*shared[: 4 * (number % 4)], number + 1, number + 7), 12, number) for number in range(6))
        answers = [model.plain_decode(ask.prompt, ask.max_tokens) for ask in asks]
        preemptions = 0
        for is_async in (False, True):
            settings = Settings(
                num_gpu_blocks=14,
                block_size=4,
                max_num_seqs=4,
                max_num_batched_tokens=24,
                max_model_len=64,
                async_scheduling=is_async,
                num_speculative_tokens=3,
                num_lookahead_tokens=3,
            )
            done = decode(model, Scene(settings, PRESETS[DEFAULT_PRESET], asks), answers=answers)
            preemptions += done.num_preemptions
            if done.outputs != answers:
                self.failures.append(f"decoding {'async' if is_async else 'sync'}: not what plain decoding says")
        print(f"decoding: {len(asks)} requests, sync and async, {preemptions} preemptions, against plain decoding")
        self.rows.append({"part": "decoding", "preemptions": preemptions})

    def bandwidth(self) -> None:
        """Attention in bfloat16 for K + 1 rows a request, and a plain read of as many bytes."""
        import torch

        from gpu_backend.attention import RaggedBatch, paged_attention
        from gpu_backend.paged_cache import PagedCache

        shapes = ((64, 4096), (16, 4096), (64, 1024), (4, 8192)) if self.on_gpu else ((2, 64),)
        for num_requests, context in shapes:
            if self._late("bandwidth"):
                return
            blocks = -(-context // _BLOCK_SIZE)
            cache = PagedCache(
                1, num_requests * blocks + 1, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, torch.bfloat16, self.device, 0.5
            )
            order = list(range(1, num_requests * blocks + 1))
            random.Random(0).shuffle(order)
            tables = [order[blocks * number : blocks * (number + 1)] for number in range(num_requests)]
            read_bytes = 2 * num_requests * context * _KV_HEADS * _HEAD_DIM * 2
            layer = cache.layers[0]
            # Summing all keys and values reads each byte once, from memory as far as the cache exceeds the card's L2.
            plain_s = self._time(lambda layer=layer: layer.view(torch.int32).sum(dtype=torch.int64))
            plain = layer.numel() * 2 / plain_s / 1e9
            for query_len in _QUERY_LENS:
                query = torch.randn(
                    num_requests * query_len, _HEADS, _HEAD_DIM, dtype=torch.bfloat16, device=self.device
                )
                batch = RaggedBatch.of(tables, [query_len] * num_requests, [context] * num_requests, self.device)
                seconds = self._time(
                    lambda query=query, layer=layer, batch=batch: paged_attention(query, layer, batch, _HEAD_DIM**-0.5)
                )
                achieved = read_bytes / seconds / 1e9
                print(
                    f"attention, {num_requests} requests of {context}, K + 1 = {query_len}: {seconds * 1e6:9.1f} us, "
                    f"{achieved:7.1f} GB/s, a plain read {plain:7.1f} GB/s ({achieved / plain:.0%})"
                )
                self.rows.append(
                    {
                        "part": "attention",
                        "dtype": "bfloat16",
                        "requests": num_requests,
                        "context": context,
                        "query_len": query_len,
                        "us": round(seconds * 1e6, 2),
                        "gb_per_s": round(achieved, 1),
                        "plain_read_gb_per_s": round(plain, 1),
                    }
                )

    # Means

    def _late(self, what: str) -> bool:
        if time.monotonic() > self._until:
            print(f"{what}: cut short, {_SECONDS:.0f} s are over")
            return True
        return False

    def _ragged(self, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Random contexts and query lengths, scattered blocks, NaN in what no row may see."""
        import torch

        from gpu_backend.attention import RaggedBatch
        from gpu_backend.paged_cache import PagedCache, block_table, slot_mapping

        draw = random.Random(seed)
        largest = 900 if self.on_gpu else 40
        kv_heads, group = draw.choice(((8, 4), (4, 7), (2, 8), (1, 1))) if self.on_gpu else (2, 2)
        block_size = draw.choice((16, 32)) if seed % 3 else draw.choice((1, 8))
        query_lens = [draw.choice((1, 1, 2, 4, 6, 8, 33)) for _ in range(draw.randint(1, 12))]
        seq_lens = [length + draw.randint(0, largest) for length in query_lens]
        needed = [-(-length // block_size) for length in seq_lens]
        order = list(range(1, sum(needed) + 1))
        draw.shuffle(order)
        tables = [[order.pop() for _ in range(count)] for count in needed]
        cache = PagedCache(1, sum(needed) + 1, block_size, kv_heads, _HEAD_DIM, dtype, self.device, float("nan"))
        generator = torch.Generator().manual_seed(seed)
        total = sum(seq_lens)
        keys, values = torch.randn(2, total, kv_heads, _HEAD_DIM, generator=generator).to(dtype).to(self.device)
        rows = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
        positions = torch.cat([torch.arange(length) for length in seq_lens])
        slots = slot_mapping(block_table(tables), rows, positions, block_size).to(self.device)
        cache.write(0, keys, values, slots)
        query = torch.randn(sum(query_lens), kv_heads * group, _HEAD_DIM, generator=generator)
        return (
            query.to(dtype).to(self.device),
            cache.layers[0],
            RaggedBatch.of(tables, query_lens, seq_lens, self.device),
        )

    def _time(self, work: Callable[[], Any]) -> float:
        """Median seconds, after warm-up; by events on a GPU."""
        import torch

        rounds, times = (20, []) if self.on_gpu else (3, [])
        for _ in range(3):
            work()
        if not self.on_gpu:
            for _ in range(rounds):
                begin = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin)
            return sorted(times)[len(times) // 2]
        with torch.cuda.device(self.device):
            for _ in range(rounds):
                begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin_event.record()
                work()
                end_event.record()
                end_event.synchronize()
                times.append(begin_event.elapsed_time(end_event) / 1e3)
        return sorted(times)[len(times) // 2]


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 all right, 1 something does not agree, 2 it cannot run here, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m gpu_backend.gpu_check", description="Check the GPU backend.")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (default), another card, or cpu in tiny sizes")
    parser.add_argument("--out", type=Path, help="write the measurements to this CSV file")
    given = parser.parse_args(arguments)
    check = None
    code = 0
    try:
        check = Check(device_of(given.device))
        check.run()
    except CannotRun as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("gpu_check: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        if type(error).__name__ not in ("OutOfMemoryError", "AcceleratorError"):
            raise
        print(
            f"gpu_check: {type(error).__name__}: {str(error).splitlines()[0]}; is another process on the card? "
            "nvidia-smi tells",
            file=sys.stderr,
        )
        code = 1
    if check is not None:
        if given.out is not None and check.rows:
            names = list(dict.fromkeys(name for row in check.rows for name in row))
            with given.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(check.rows)
            print(f"{len(check.rows)} measurements in {given.out}")
        for failure in check.failures:
            print(f"gpu_check: {failure}", file=sys.stderr)
        code = code or (1 if check.failures else 0)
    if code == 0:
        print("all right")
    return code


if __name__ == "__main__":
    sys.exit(main())
