"""Where speculation stops to pay: output throughput against K = 0, by load, K and acceptance, on the timing model.

    python benchmarks/crossing.py [--part shape|blocks|published] [--out DIR] [--jobs N]

`shape`: a fixed number of requests is always under way (a closed loop), prompts of 500 tokens and answers of 200,
Llama-3.1-8B on an H100 with EAGLE-3. Prints, for each K and acceptance rate, the speed-up at each load and the load at
which it passes 1. Expected, as published: speculation wins at low load and loses at high load; the crossing point falls
with K and rises with acceptance.

`blocks`: the same twice, with the card's own pool and with a small one, and what the ledger says of each. Where K loses
in the small pool alone, and requests are preempted there, it is blocks and not arithmetic.

`published`: what vLLM's team published for Llama-3-70B on four H100 ("How Speculative Decoding Boosts vLLM Performance
by up to 2.8x", 17 October 2024): 1.5 times faster at one request a second on ShareGPT with a drafter of 0.5B, 2.8 times
on CNN/DailyMail with n-grams, and 1.4 and 1.8 times slower at high rates. K, acceptance, the high rate and the measure
are not told, and that engine was the one before V1. So the same cards, model, drafters and lengths like those of the
two sets, K = 5 as in the post's examples, several acceptance rates, and the time per output token of K = 0 over that of
K = 5.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

import sim

K = "engine.speculative_config.num_speculative_tokens"
RATE = "acceptance.rate"
LOAD = "workload.synthetic.arrivals.concurrency"
ARRIVALS = "workload.synthetic.arrivals.rate"
REQUESTS = "workload.synthetic.num_requests"
LOADS = [1, 4, 16, 32, 64, 128, 256, 512]
KS = [1, 2, 4, 8]
RATES = [0.3, 0.5, 0.7]

SCENARIO = """
model: llama-3.1-8b
hardware: h100
engine: {max_model_len: 2048, max_num_seqs: 512, speculative_config: {method: eagle3, num_speculative_tokens: 4}}
acceptance: {model: geometric, rate: 0.5}
workload:
  synthetic:
    num_requests: 24
    arrivals: {process: closed_loop, concurrency: 1}
    prompt_tokens: 500
    output_tokens: 200
"""

SEVENTY = """
model: llama-3.1-70b
hardware: h100
engine: {max_model_len: 4096, max_num_seqs: 256, tensor_parallel_size: 4}
acceptance: {model: geometric, rate: 0.6}
workload:
  synthetic:
    num_requests: 60
    arrivals: {process: poisson, rate: 1}
    prompt_tokens: 200
    output_tokens: 200
"""
DRAFTER = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 56,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
"""As large as the one published, Qwen2-0.5B with Llama 3's vocabulary; its 14 heads cannot be split among four cards,
so here it has 16 narrower ones."""
PUBLISHED: dict[str, tuple[dict[str, object], tuple[int, int], tuple[int, int], list[float]]] = {
    "ShareGPT": (
        {"method": "draft_model", "model": "", "num_speculative_tokens": 5},
        (20, 420),
        (50, 350),
        [0.4, 0.5, 0.6, 0.7],
    ),
    "CNN/DailyMail": ({"method": "ngram", "num_speculative_tokens": 5}, (500, 1100), (40, 120), [0.4, 0.6, 0.75, 0.85]),
}
"""Drafter, prompt and answer lengths, and acceptance rates."""


def crossing(loads: list[float], ratios: list[float]) -> float | None:
    """The load at which the ratio falls through 1, straight between logarithms of loads; None if it does not."""
    for number in range(1, len(loads)):
        before, after = ratios[number - 1], ratios[number]
        if before >= 1 > after:
            share = (before - 1) / (before - after)
            return math.exp(math.log(loads[number - 1]) * (1 - share) + math.log(loads[number]) * share)
    return None


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Output throughput over that without speculation at the same load; rows (rate, K), columns loads."""
    table = frame.pivot_table(values="output_throughput", index=[RATE, K], columns=LOAD)
    base = table.xs(0, level=K)
    return table.drop(index=0, level=K).div(base.iloc[0], axis=1)


def shape(out: str, jobs: int | None, scenario: Path) -> None:
    """The table of speed-ups."""
    points = [{LOAD: load, REQUESTS: max(24, 3 * load)} for load in LOADS]
    axes = {"grid": {K: [0, *KS], RATE: RATES}, "list": points}
    frame = sim.sweep({"name": "crossing", "scenario": str(scenario), "axes": axes}, out=out, jobs=jobs).table()
    print("acceptance   K  " + "".join(f"{load:>7}" for load in LOADS) + "   speed-up is 1 at")
    for (rate, k), row in speedups(frame).iterrows():
        at = crossing(LOADS, row.tolist())
        told = f"{at:.0f}" if at is not None else "beyond" if row.iloc[-1] >= 1 else "never above"
        print(f"      {rate:>4}  {k:>3}  " + "".join(f"{value:>7.2f}" for value in row) + f"   {told}")
    print(f"preemptions in all runs: {frame['num_preemptions'].sum():.0f}")


def blocks(out: str, jobs: int | None, scenario: Path) -> None:
    """The same loads in the card's own pool and in a small one, with the ledger's account of each.

    The drafter's keys and values are in the pool: 16 layers of 8 heads of 64 to the target's 32 layers of 8 heads of
    128. So of the same bytes K = 0 has a quarter more blocks.
    """
    loads = [16, 32, 48, 64, 80, 96, 112]
    drafter = {"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 4}
    keys = {RATE: 0.7, "engine.speculative_config": drafter}
    in_own: dict[tuple[int, int], float] = {}
    print("pool    K  users  speed-up   held   preempted   recomputed        drafts   because of")
    for pool, pools in (("own", [None] * 3), ("small", [4000, 3200, 3200])):
        axes = {
            "zip": {K: [0, 2, 4], "engine.num_gpu_blocks": pools},
            "list": [{LOAD: load, REQUESTS: 4 * load} for load in loads],
        }
        sweep = {"name": f"pool-{pool}", "scenario": str(scenario), "set": keys, "axes": axes}
        frame = sim.sweep(sweep, out=out, jobs=jobs).table().set_index([K, LOAD])
        for k, load in product((2, 4), loads):
            run, base = frame.loc[(k, load)], frame.loc[(0, load)]
            ratio = run["output_throughput"] / base["output_throughput"]
            arithmetic = in_own.setdefault((k, load), ratio) < 1
            cause = "" if ratio >= 1 else "arithmetic" if arithmetic else "blocks"
            whole = (run["num_gpu_blocks"] - 1) * run["block_size"] * run["duration_s"]
            drafts = (run["slot_seconds_placeholder"] + run["slot_seconds_lookahead"]) / whole
            again, again_base = (one["recomputed_tokens"] / one["num_output_tokens"] for one in (run, base))
            print(
                f"{pool:<6} {k:>2}  {load:>5}  {ratio:>8.2f}  {run['kv_cache_usage_perc_mean']:>5.0%}  "
                f"{run['num_preemptions']:>4.0f} ({base['num_preemptions']:>2.0f})  "
                f"{again:>6.1%} ({again_base:>5.1%})  {drafts:>11.1%}   {cause}"
            )
    print("In brackets: of K = 0. Held, and drafts with lookahead: shares of the pool. Because of blocks: K is slower")
    print("here and not in the card's own pool, on the same requests and the same draws.")


def published(out: str, jobs: int | None, folder: Path) -> None:
    """Four H100 and a 70B, by requests a second."""
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(DRAFTER))
    scenario = folder / "seventy.yaml"
    scenario.write_text(SEVENTY)
    rates = [1, 2, 4, 8, 16, 32]
    print("set              acceptance  " + "".join(f"{rate:>7}" for rate in rates) + "   requests a second")
    for name, (speculation, prompts, answers, acceptance) in PUBLISHED.items():
        if "model" in speculation:
            speculation = speculation | {"model": str(folder / "drafter" / "config.json")}
        sweep = {
            "name": name.replace("/", "-"),
            "scenario": str(scenario),
            "set": {
                "engine.speculative_config": speculation,
                "workload.synthetic.prompt_tokens": {"distribution": "uniform", "min": prompts[0], "max": prompts[1]},
                "workload.synthetic.output_tokens": {"distribution": "uniform", "min": answers[0], "max": answers[1]},
            },
            "axes": {
                "grid": {K: [0, 5], RATE: acceptance},
                "list": [{ARRIVALS: rate, REQUESTS: max(60, 20 * rate)} for rate in rates],
            },
        }
        frame = sim.sweep(sweep, out=out, jobs=jobs).table()
        table = frame.pivot_table(values="tpot_ms_mean", index=[RATE, K], columns=ARRIVALS)
        for rate in acceptance:
            ratios = table.loc[(rate, 0)] / table.loc[(rate, 5)]
            print(f"{name:<16} {rate:>10}  " + "".join(f"{ratio:>7.2f}" for ratio in ratios))


def main() -> None:
    """Run the sweeps and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("shape", "blocks", "published"), default="shape")
    parser.add_argument("--out", default=None)
    parser.add_argument("--jobs", type=int, default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        scenario = Path(folder) / "crossing.yaml"
        scenario.write_text(SCENARIO)
        out = given.out or folder
        if given.part == "shape":
            shape(out, given.jobs, scenario)
        elif given.part == "blocks":
            blocks(out, given.jobs, scenario)
        else:
            published(out, given.jobs, Path(folder))


if __name__ == "__main__":
    main()
