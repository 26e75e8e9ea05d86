"""Where the measured data are that some benchmarks hold the simulator to, and whose they are.

Knows a default folder and the sources' names; must not know what is compared. docs/timing.md tells how to get them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

BESIDE: Final = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
"""Used where no folder is given: ../shared/data beside the repository."""
SOURCES: Final = {
    "gpu/aic_serving_H200_vllm.csv": "aiconfigurator (ai-dynamo, Apache-2.0)",
    "real_vllm/llmservingsim_realvllm_RTX4090_Llama-3.1-8B_requests.jsonl": "LLMServingSim (MIT)",
    "real_vllm/llmservingsim_realvllm_RTX4090_Llama-3.1-8B_timeseries.csv": "LLMServingSim (MIT)",
    "acceptance/specdecodebench_gsm8k.jsonl.gz": "SpecDecode-Bench (no licence file)",
    "acceptance/specdecodebench_sharegpt.jsonl.gz": "SpecDecode-Bench (no licence file)",
    "published/specdecodebench_measured_speedups.csv": "SpecDecode-Bench (no licence file)",
    "published/specdecodebench_simulated_speedups.csv": "SpecDecode-Bench (no licence file)",
}
"""Files in that folder, and whose data they hold."""


def data_folder(given: str | Path | None, *names: str) -> Path:
    """The folder given, or the one beside the repository, with all files named; `names` are keys of `SOURCES`.

    Ends the command with exit code 2 and one line where a file is missing.
    """
    folder = BESIDE if given is None else Path(given)
    for name in names:
        if not (folder / name).is_file():
            where = f"{folder}/{name}" if given is not None else f"../shared/data/{name} beside the repository"
            print(
                f"{Path(sys.argv[0]).name}: there is no {where}; it holds data of {SOURCES[name]}, which do not come "
                "with speckv: give their folder as DATA (docs/timing.md, Where the measured data come from)",
                file=sys.stderr,
            )
            raise SystemExit(2)
    return folder
