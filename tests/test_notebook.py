"""What notebooks call: figures side by side, slots of a request, and pictures, on runs whose answers are known."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from sim import notebook, simulate
from sim.pictures import COLOURS
from sim.run import Result

matplotlib.use("Agg")

ONE = (
    "output.pictures=false",
    "workload.synthetic={num_requests: 1, arrivals: {process: all_at_once}, prompt_tokens: 100, output_tokens: 40}",
    "engine.num_gpu_blocks=200",
)
NOTHING_ACCEPTED = "acceptance={model: geometric, rate: 0.0}"
SYNC = "engine.async_scheduling=false"


def run(folder: Path, *overrides: str) -> Result:
    return simulate("quickstart", [*ONE, *overrides], out=folder)


def method(name: str) -> str:
    return f"engine.speculative_config={{method: {name}, num_speculative_tokens: 5}}"


# (f + 1)(K + 1) - 1 + L with f other frames in flight and L slots written ahead; K = 5.
@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ((method("eagle3"),), 16),
        ((method("eagle3"), SYNC), 10),
        ((method("ngram_gpu"),), 11),
        ((method("ngram"),), 5),
        (("engine.speculative_config=null",), 1),
        (("engine.speculative_config=null", SYNC), 0),
    ],
)
def test_slots_promised_beyond_the_known_tokens(tmp_path: Path, overrides: tuple[str, ...], most: int) -> None:
    result = run(tmp_path, NOTHING_ACCEPTED, *overrides)
    assert notebook.beyond_known(result).iloc[2:].max() == most


def test_more_than_one_request_cannot_be_followed(tmp_path: Path) -> None:
    result = run(tmp_path, "workload.synthetic.num_requests=2")
    with pytest.raises(ValueError, match="got 2"):
        notebook.beyond_known(result)


def test_slots_of_a_running_request(tmp_path: Path) -> None:
    """Synchronous, nothing accepted: 5 garbage slots from the first verification's end on, 5 slots written ahead."""
    result = run(
        tmp_path, NOTHING_ACCEPTED, SYNC, "timing.schedule_ms=0", "timing.update_ms=0", "timing.fixed_step_ms=10"
    )
    # 40 steps of 10 ms: one of prefill, 39 verifications; garbage from the end of the first, at 20 ms, to 400 ms.
    assert notebook.running_seconds(result) == pytest.approx(0.4)
    slots = notebook.slots_per_request(result)
    assert slots["content_garbage"] == pytest.approx(5 * 380 / 400)
    assert slots["placeholder"] == pytest.approx(5 * 390 / 400)
    assert slots["lookahead"] == pytest.approx(5)


def test_moments_of_the_article_s_example(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "workload.synthetic.prompt_tokens=1018",
        SYNC,
        "acceptance={model: per_position, convention: conditional, rates: [1, 1, 0, 0, 0]}",
    )
    seen = notebook.moments(result, steps=[1])
    assert [(moment.what, moment.computed) for moment in seen] == [
        ("step 1 scheduled", 1024),
        ("step 1 ended", 1024),
        ("step 1 taken back", 1021),
    ]
    assert seen[2].content()[63 * 16 : 64 * 16] == "v" * 13 + "x" * 3
    axes = Figure().subplots()
    notebook.draw_blocks(axes, seen, 63, 1, content=True)
    letters = [text.get_text() for text in axes.texts]
    assert letters.count("x") == 6
    assert "block 63" in letters
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["valid", "garbage", "blank"]


def test_side_by_side_shows_text(tmp_path: Path) -> None:
    result = run(tmp_path)
    table = notebook.side_by_side(
        {"a": result}, {"output": "num_output_tokens", "pool": "drafter_pool", "twice": lambda r: 2 * 0.123456}
    )
    assert table["a"].to_dict() == {"output": "40", "pool": "-", "twice": "0.247"}
    with pytest.raises(KeyError, match="there is no nowhere; there is in_flight"):
        notebook.value(result, "slot_seconds.nowhere")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1234567, "1,234,567"), (1234.5, "1,234"), (0.04567, "0.0457"), (None, "-"), (True, "yes"), ("x", "x")],
)
def test_shown(number: object, text: str) -> None:
    assert notebook.shown(number) == text


def test_a_class_and_a_preset_have_their_own_colour_and_the_rest_the_palette_s() -> None:
    found = notebook.colours(["lookahead", "other", "vllm-0.32", "another"])
    assert found[0] == COLOURS["lookahead"]
    assert found[2] == notebook.PRESET_COLOURS["vllm-0.32"]
    assert len(set(found)) == 4


def test_pictures_have_units_and_a_legend(tmp_path: Path) -> None:
    notebook.use_style()
    table = pd.DataFrame({"article": [1.0, 2.0], "vllm-0.32": [3.0, 4.0]}, index=[1, 2])
    bars, stack, lines, pool = Figure().subplots(4, 1)
    notebook.draw_bars(bars, table, unit="slots")
    notebook.draw_stack(stack, table, unit="ms")
    notebook.draw_lines(lines, table, xlabel="K", ylabel="tokens")
    notebook.draw_occupancy(pool, run(tmp_path), classes=("placeholder", "lookahead"), garbage_line=True)
    assert [axes.get_ylabel() for axes in (bars, lines, pool)] == ["slots", "tokens", "share of the pool (%)"]
    assert [axes.get_xlabel() for axes in (stack, lines, pool)] == ["ms", "K", "simulated time (s)"]
    for axes in (bars, stack, lines):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["article", "vllm-0.32"]
    assert [text.get_text() for text in pool.get_legend().get_texts()] == [
        "garbage in memory",
        "lookahead",
        "placeholder",
    ]
    assert [text.get_text() for text in bars.texts] == ["1", "2", "3", "4"]
    assert [text.get_text().strip() for text in stack.texts] == ["4", "6"]
    assert np.allclose([bar.get_height() for bar in bars.patches], [1, 2, 3, 4])
