"""The picture: how steps are thinned, held to integrals by hand, and that it is there with its panels."""

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from sim import pictures
from sim.observers.ledger import RESERVATION_CLASSES
from sim.observers.recorder import STEP_COLUMNS
from sim.results import ResultsError


def write_steps(folder: Path, **columns: list[int]) -> None:
    """A table of steps; columns not given are 0, but for a pool that is free."""
    length = len(columns["scheduled_ns"])
    full = {name: columns.get(name, [100 if name == "res_free" else 0] * length) for name in STEP_COLUMNS}
    pq.write_table(pa.table(full), folder / "steps.parquet", row_group_size=2)


def test_a_bin_a_step_while_they_are_few(tmp_path: Path) -> None:
    write_steps(
        tmp_path,
        scheduled_ns=[0, 10, 40],
        updated_ns=[12, 42, 60],
        num_running=[1, 5, 2],
        num_tokens=[8, 4, 2],
    )
    thinned = pictures.thin(tmp_path)
    assert thinned.num_steps == 3
    assert thinned.edges_s.tolist() == pytest.approx([0, 10e-9, 40e-9, 60e-9])
    assert thinned.states["num_running"].tolist() == [1, 5, 2]
    assert thinned.tokens["num_tokens"].tolist() == [8, 4, 2]


def test_two_steps_at_one_time_are_one_bin(tmp_path: Path) -> None:
    write_steps(tmp_path, scheduled_ns=[0, 0, 10], updated_ns=[5, 10, 20], num_running=[1, 2, 3], num_tokens=[8, 4, 2])
    thinned = pictures.thin(tmp_path)
    assert thinned.states["num_running"].tolist() == [2, 3]
    assert thinned.tokens["num_tokens"].tolist() == [6, 2]


def test_bins_hold_means_over_time(tmp_path: Path) -> None:
    """From 0 to 60 in two bins: [0, 30) holds 1 for 10 and 5 for 20, [30, 60) holds 5 for 10 and 2 for 20."""
    write_steps(
        tmp_path,
        scheduled_ns=[0, 10, 40],
        updated_ns=[12, 42, 60],
        num_running=[1, 5, 2],
        num_tokens=[8, 4, 2],
    )
    thinned = pictures.thin(tmp_path, points=2)
    assert thinned.states["num_running"].tolist() == pytest.approx([(10 + 100) / 30, (50 + 40) / 30])
    assert thinned.tokens["num_tokens"].tolist() == [6, 2]


def test_thinning_keeps_the_integral(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    times = np.cumsum(random.integers(1, 1000, 5000))
    running = random.integers(0, 256, 5000)
    end = int(times[-1]) + 100
    write_steps(
        tmp_path,
        scheduled_ns=times.tolist(),
        updated_ns=[*times[1:].tolist(), end],
        num_running=running.tolist(),
    )
    thinned = pictures.thin(tmp_path)
    assert len(thinned.states["num_running"]) == pictures.POINTS
    whole = float(np.sum(running * np.diff([*times, end]))) / 1e9
    assert np.sum(thinned.states["num_running"] * np.diff(thinned.edges_s)) == pytest.approx(whole)


def test_the_picture_is_there(tmp_path: Path) -> None:
    count = 50
    write_steps(
        tmp_path,
        scheduled_ns=[number * 10**7 for number in range(count)],
        updated_ns=[number * 10**7 + 10**7 for number in range(count)],
        num_running=list(range(count)),
        num_tokens=[6] * count,
        num_draft_tokens=[5] * count,
        num_accepted_tokens=[2] * count,
        res_committed=list(range(count)),
        res_free=[100 - number for number in range(count)],
    )
    drawn = pictures.draw(tmp_path, "a title")
    assert drawn == tmp_path / "overview.png"
    head = drawn.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1200, 1440)


def test_panels_say_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    write_steps(tmp_path, scheduled_ns=[0, 10], updated_ns=[5, 20], res_committed=[40, 60], res_free=[60, 40])
    pictures.draw(tmp_path, "a title")
    (figure,) = figures
    shown = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert set(shown[0]) == {name.replace("_", " ") for name in RESERVATION_CLASSES}
    assert shown[2] == ["running", "waiting"]
    assert shown[3] == ["prefill", "rejected drafts", "accepted drafts", "bonus"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        *("share of the pool (%)", "share of the pool (%)", "requests", "tokens a step")
    ]
    assert figure.axes[-1].get_xlabel() == "simulated time (s)"


def test_without_steps_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no table of steps"):
        pictures.draw(tmp_path, "a title")
    write_steps(tmp_path, scheduled_ns=[], updated_ns=[])
    with pytest.raises(ValueError, match="no step was taken"):
        pictures.draw(tmp_path, "a title")
