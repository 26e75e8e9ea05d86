"""The timeline and the block map: valid files, spans that nest, and slots that add up to the pool."""

from __future__ import annotations

import gzip
import json
import struct
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim.block_map import BlockMap, Looker, block_map, draw_block_map
from sim.build import Simulation, build
from sim.cli import app
from sim.observers.blocks import Blocks
from sim.records import Batch, Interruption, Returned
from sim.run import simulate
from sim.scenario import load_scenario
from sim.timeline import ENGINE, POOL, REQUESTS, write_timeline

TINY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
output: {pictures: false}
events:
  - {type: abort, request: 3, at_s: 0.3}
  - {type: reset_prefix_cache, at_s: 0.5, reset_running_requests: true}
workload:
  synthetic:
    num_requests: 40
    arrivals: {process: poisson, rate: 60}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
"""  # noqa: E501


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return simulate("tiny.yaml").folder


@pytest.fixture
def events(tiny: Path) -> list[dict[str, Any]]:
    write_timeline(tiny, Path("run.json"))
    found = json.loads(Path("run.json").read_text())
    assert isinstance(found["traceEvents"], list)
    return list(found["traceEvents"])


def test_events_have_what_the_format_asks(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event["ph"] in "BEXCMi"
        assert event["pid"] in (ENGINE, REQUESTS, POOL)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] == "E" or event["name"]
        assert event["ph"] != "X" or event["dur"] >= 0


def test_lanes_nest(events: list[dict[str, Any]], tiny: Path) -> None:
    """In each lane the request is outermost and its states follow each other inside of it."""
    import pandas as pd

    stacks: dict[int, list[str]] = defaultdict(list)
    last: dict[int, float] = {}
    preempted: dict[int, int] = defaultdict(int)
    for event in events:
        if event["pid"] != REQUESTS or event["ph"] == "M":
            continue
        lane = event["tid"]
        assert event["ts"] >= last.get(lane, 0)
        last[lane] = event["ts"]
        if event["ph"] == "E":
            stacks[lane].pop()
            continue
        stacks[lane].append(event["name"])
        assert stacks[lane][0] == f"r{lane - 1}"
        assert len(stacks[lane]) == 1 or stacks[lane][1] in ("waiting", "running", "preempted")
        assert len(stacks[lane]) <= 2
        preempted[lane] += event["name"] == "preempted"
    assert not any(stacks.values())
    requests = pd.read_parquet(tiny / "requests.parquet")
    assert len(stacks) == len(requests) == 40
    for index, preemptions, finish_ns in requests[["request", "num_preemptions", "finish_ns"]].to_numpy().tolist():
        assert preempted[index + 1] == preemptions
        assert last[index + 1] == pytest.approx(finish_ns / 1000)
    assert requests["num_preemptions"].sum() > 0


def test_steps_and_host_time_do_not_overlap(events: list[dict[str, Any]], tiny: Path) -> None:
    summary = json.loads((tiny / "summary.json").read_text())
    for thread in (1, 2):
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
        for one, other in pairwise(spans):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert len(steps) == summary["num_steps"]
    assert sum(step["args"]["num_draft_tokens"] for step in steps) >= summary["num_draft_tokens"]


def test_counters_add_up_to_the_pool(events: list[dict[str, Any]]) -> None:
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert set(counters) == {"reserved", "in memory", "queues"}
    for name in ("reserved", "in memory"):
        assert {sum(values.values()) for values in counters[name]} == {29 * 16}
    assert max(values["placeholder"] for values in counters["reserved"]) > 0
    assert max(values["garbage"] for values in counters["in memory"]) > 0


def test_a_zipped_one_is_the_same_and_the_same_again(tiny: Path, events: list[dict[str, Any]]) -> None:
    write_timeline(tiny, Path("run.json.gz"))
    first = Path("run.json.gz").read_bytes()
    assert json.loads(gzip.decompress(first))["traceEvents"] == events
    write_timeline(tiny, Path("run.json.gz"))
    assert Path("run.json.gz").read_bytes() == first
    assert sorted(path.name for path in Path().glob("run*")) == ["run.json", "run.json.gz"]


class SlotBySlot:
    """The map by its definition: after every record each block is drawn anew, slot by slot (docs/ledger.md)."""

    NAMES = ("in flight", "placeholder", "committed", "garbage", "lookahead", "slack", "cached", "free")
    MORE_CERTAIN = ("committed", "in flight", "placeholder", "garbage", "lookahead", "slack")

    def __init__(self, simulation: Simulation) -> None:
        self.ledger = simulation.ledger
        self.blocks = Blocks(self.ledger.num_blocks)
        self.tables: dict[int, list[int]] = {}
        self.seen: list[tuple[int, list[int], list[int]]] = []
        """After each record: its time, and each block's class and garbage."""

    def scheduled(self, now: int, batch: Batch) -> None:
        self.blocks.follow(batch.block_operations)
        for request in (*batch.requests, *batch.preempted):
            self.tables[request.index] = list(request.block_table)
        self.draw(now)

    def step_ended(self, now: int, batch: Batch) -> None:
        self.draw(now)

    def updated(self, now: int, returned: Returned) -> None:
        self.blocks.follow(returned.block_operations)
        for request in returned.batch.requests:
            self.tables[request.index] = list(request.block_table)
        self.draw(now)

    def interrupted(self, now: int, interruption: Interruption) -> None:
        self.blocks.follow(interruption.block_operations)
        self.draw(now)

    def draw(self, now: int) -> None:
        ledger, size = self.ledger, self.ledger.block_size
        blocks = range(1, ledger.num_blocks)
        refs, hashed = self.blocks.refs, self.blocks.hashed
        names = ["committed" if refs[b] else "cached" if hashed[b] else "free" for b in blocks]
        garbage = [0] * len(names)
        for index, account in ledger.accounts.items():
            certain = account.computed - account.in_flight
            rows = certain + account.in_flight - account.drafts

            def kind(slot: int) -> str:
                if slot < certain:  # noqa: B023
                    return "committed"
                if slot < rows:  # noqa: B023
                    return "in flight"
                if slot < account.computed:  # noqa: B023
                    return "placeholder"
                if slot < account.written:  # noqa: B023
                    return "garbage"
                return "lookahead" if slot < account.reserved else "slack"  # noqa: B023

            for number, block in enumerate(self.tables[index]):
                slots = [kind(slot) for slot in range(number * size, number * size + size)]
                most = max(self.MORE_CERTAIN, key=slots.count)  # the first of equal ones
                if most != "committed":
                    names[block - 1] = most
                written = range(max(number * size, account.content_valid), number * size + size)
                garbage[block - 1] = max(garbage[block - 1], sum(slot < account.content_written for slot in written))
        self.seen.append((now, [self.NAMES.index(name) for name in names], garbage))


@pytest.mark.parametrize("more", [[], ["engine.policies.reservation=worst_case"], ["engine.policies.undo=rewind"]])
def test_the_map_is_what_every_record_leaves(tiny: Path, more: list[str]) -> None:
    """At each instant the classes and the garbage that the last record before it left; sums are the ledger's own."""
    scenario = load_scenario("tiny.yaml", more)
    simulation = build(scenario)
    naive = SlotBySlot(simulation)
    simulation.add_observer(naive)
    simulation.run()
    instants = np.arange(1, simulation.now, simulation.now // 400)
    assert len({names for _, seen, _ in naive.seen for names in seen}) >= 5
    simulation = build(scenario)
    looker = Looker(simulation, instants)
    simulation.add_observer(looker, before_ledger=True)

    class Sums:
        """Told before the ledger, and before the map."""

        def step_ended(self, now: int, batch: Batch) -> None:
            ledger = simulation.ledger
            classes, garbage = looker.drawn()
            counts = np.bincount(classes[1:], minlength=8)
            assert counts[6] == ledger.cached_blocks
            assert counts[7] == ledger.num_blocks - 1 - ledger.held_blocks - ledger.cached_blocks
            assert garbage.sum() == ledger.content_garbage

    simulation.add_observer(Sums(), before_ledger=True)
    simulation.run()
    assert looker.done
    times = [now for now, _, _ in naive.seen]
    for column, instant in enumerate(instants):
        number = bisect_right(times, instant) - 1  # a record at the instant itself counts
        if number >= 0:
            assert looker.classes[:, column].tolist() == naive.seen[number][1], instant
            assert looker.garbage[:, column].tolist() == naive.seen[number][2], instant


def test_a_map_of_a_stretch(tiny: Path) -> None:
    seen = block_map(tiny, 0.2, 0.4)
    assert seen.classes.shape == seen.garbage.shape == (29, 1000)
    assert seen.times_s[0] == pytest.approx(0.2001)
    assert seen.times_s[-1] == pytest.approx(0.3999)
    assert seen.blocks_per_row == 1
    assert len(np.unique(seen.classes)) > 3
    with pytest.raises(ValueError, match="the run goes from 0 to"):
        block_map(tiny, 5.0, 1.0)


def test_many_blocks_share_rows(tmp_path: Path) -> None:
    """1,100 blocks: three a row, in 367 rows; a row's class is that of most of its blocks, its garbage their mean."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    simulation = build(load_scenario(tmp_path / "tiny.yaml", ["engine.num_gpu_blocks=1101"]))
    looker = Looker(simulation, np.asarray([5], dtype=np.int64))
    classes, garbage = looker.drawn()
    assert set(classes) == {7}
    classes[1:7] = [2, 2, 7, 1, 6, 6]
    garbage[1:7] = [3, 0, 0, 1, 1, 1]
    kinds, means = looker._in_rows(classes, garbage)
    assert looker.blocks_per_row == 3
    assert kinds.shape == looker.classes[:, 0].shape == (367,)
    assert kinds[:3].tolist() == [2, 6, 7]
    assert means[:3].tolist() == [1, 1, 0]


def test_the_pictures_and_the_commands(tiny: Path) -> None:
    done = CliRunner().invoke(app, ["blockmap", str(tiny), "-o", "map.png", "--from", "0.2"])
    assert done.exit_code == 0, done.output
    picture = Path("map.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1440, 1320)
    assert CliRunner().invoke(app, ["timeline", str(tiny), "-o", "t.json.gz"]).exit_code == 0
    done = CliRunner().invoke(app, ["timeline", str(tiny), "-o", "nowhere/t.json"])
    assert done.exit_code == 1
    assert "nowhere" in done.stderr
    assert CliRunner().invoke(app, ["blockmap", str(tiny), "-o", "m.png", "--from", "99"]).exit_code == 2
    assert CliRunner().invoke(app, ["timeline", "results", "-o", "t.json"]).exit_code == 2
    one = BlockMap(np.array([1.0]), np.full((2, 1), 7, np.uint8), np.zeros((2, 1), np.float32), 1, 2, 16)
    draw_block_map(one, "an empty pool", Path("empty.png"))
