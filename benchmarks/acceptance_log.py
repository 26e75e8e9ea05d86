"""A log of a million lines: writes one, reads and fits it in a process of its own, prints how long and how much memory.

    python benchmarks/acceptance_log.py [LINES]

One line in four counts drafts; the others are what a server logs beside it. The target: 20 s and 300 MB.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_BESIDE = (
    "(APIServer pid=7) INFO 03-05 12:00:10 [loggers.py:360] Engine 000: Avg prompt throughput: 812.4 tokens/s, "
    "Avg generation throughput: 1290.7 tokens/s, Running: 24 reqs, Waiting: 3 reqs, GPU KV cache usage: 91.3%\n"
)


def write_log(path: Path, lines: int) -> None:
    """`lines` lines, every fourth with draft counts of an interval, 400 to 499 drafts with K = 3."""
    with path.open("w") as file:
        for number in range(lines):
            if number % 4:
                file.write(_BESIDE)
                continue
            drafts = 400 + number // 4 % 100
            accepted = [round(drafts * rate) for rate in (0.67, 0.435, 0.278)]
            rates = ", ".join(f"{count / drafts:.3f}" for count in accepted)
            total = sum(accepted)
            file.write(
                f"(APIServer pid={number % 3}) INFO 03-05 12:00:10 [metrics.py:125] SpecDecoding metrics: "
                f"Mean acceptance length: {1 + total / drafts:.2f}, Accepted throughput: {total / 10:.2f} tokens/s, "
                f"Drafted throughput: {3 * drafts / 10:.2f} tokens/s, Accepted: {total} tokens, "
                f"Drafted: {3 * drafts} tokens, Per-position acceptance rate: {rates}, "
                f"Avg Draft acceptance rate: {100 * total / (3 * drafts):.1f}%\n"
            )


def main() -> None:
    """Write, read, fit, print."""
    if len(sys.argv) == 3 and sys.argv[1] == "--fit":
        from sim.acceptance_sources import read_sources
        from sim.models.acceptance_fit import fit

        began = time.perf_counter()
        source = read_sources([sys.argv[2]])
        fits = [fit(model, source.evidence) for model in ("geometric", "per_position")]
        took = time.perf_counter() - began
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{took:.1f} s, {most:.0f} MB at most; {fits[0].num_steps} drafts; {dict(fits[1].section)}")
        return
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        write_log(log, lines)
        print(f"{lines} lines, {log.stat().st_size / 1e6:.0f} MB")
        root = Path(__file__).resolve().parent.parent
        subprocess.run([sys.executable, __file__, "--fit", str(log)], check=True, cwd=root, env=_with_path(root))


def _with_path(root: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(root)}


if __name__ == "__main__":
    main()
