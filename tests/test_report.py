"""Reports: what the page holds, what it weighs, that nothing in it is taken for HTML, and that it works in a browser.

The browser is a headless Chromium; without one, the tests that need it are skipped.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sim import results
from sim.cli import app
from sim.pictures import COLOURS
from sim.report import report_page, write_report
from sim.report.columns import numbers, packed, runs, short
from sim.report.meanings import CLASSES, column_meaning, figures
from sim.report.page import embedded
from sim.results import ResultsError
from sim.run import simulate

REPOSITORY = Path(__file__).resolve().parent.parent
MOST_BYTES = 5_000_000
EVIL = "</script><script>window.taken=1</script><img src=x onerror=window.taken=1>'\"&{{x}}\u2028"
TINY = """
engine: {num_gpu_blocks: 30, max_model_len: 256, max_num_seqs: 8, speculative_config: {method: eagle3, num_speculative_tokens: 3}}
output: {pictures: false, distributions: true}
slo: {ttft_ms: 200, tpot_ms: 40}
workload:
  synthetic:
    num_requests: 60
    arrivals: {process: poisson, rate: 60}
    prompt_tokens: {distribution: uniform, min: 8, max: 90}
    output_tokens: {distribution: uniform, min: 1, max: 60}
"""  # noqa: E501

pytestmark = pytest.mark.xdist_group("report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with preemptions."""
    place = tmp_path_factory.mktemp("report")
    (place / "tiny.yaml").write_text(TINY)
    return simulate(place / "tiny.yaml", out=place / "results").folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return report_page(folder)


def make_sweep(folder: Path, *, evil: bool = False) -> Path:
    """A sweep of eight points by two seeds, made by hand. Throughput is 100 (1 + rate) - 10 |K - best|, best is 4 at
    rate 1 and 0 at rate 8; time a token is 10 + rate. Seeds differ by 2 in throughput. One run failed."""
    key, load, label = "engine.speculative_config.num_speculative_tokens", "workload.synthetic.arrivals.rate", "model"
    (folder / "points").mkdir(parents=True)
    number = 0
    for rate, best in ((1, 4), (8, 0)):
        for k in (0, 2, 4, 6):
            rows = []
            for seed in (0, 1):
                failed = (rate, k, seed) == (1, 6, 1)
                rows.append(
                    {
                        **{"point": number, "seed": seed, key: k, load: float(rate), label: EVIL if evil else "a"},
                        "status": "failed" if failed else "ok",
                        "error": (EVIL if evil else "no") if failed else None,
                        **{"stopped_by": None, "scenario_digest": f"{number}-{seed}", "num_requests": 10},
                        "output_throughput": np.nan if failed else 100.0 * (1 + rate) - 10 * abs(k - best) + 2 * seed,
                        "tpot_ms_mean": np.nan if failed else 10.0 + rate,
                    }
                )
            pd.DataFrame(rows).to_parquet(folder / "points" / f"{number:05d}.parquet")
            number += 1
    manifest = {
        **{"schema_version": 1, "name": "by-hand", "complete": True, "sweep_digest": "0", "set": {}, "seeds": [0, 1]},
        **{"columns": [key, load, label], "num_points": 8, "num_runs": 16, "limits": {"time_s": None}},
        **{
            "speckv": "0.2.0.dev0",
            "started": "then",
            "finished": "now",
            "inputs": [],
            "scenario_file": "/a/b/mine.yaml",
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def data_of(page: str) -> Any:
    """What the page's script is given."""
    (written,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(written)


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# What the page holds


def test_every_figure_of_the_summary_is_there_with_what_it_means(folder: Path, page: str) -> None:
    summary = results.read_json(folder / "summary.json")
    assert summary["garbage"]["num_rollbacks"] > 0
    every = figures(summary)
    words = "".join(Elements(page).words)
    names = {one.name for one in every}
    assert {"output_throughput", "ttft_ms.p99", "slot_seconds.placeholder_rejected"} <= names
    assert {"garbage.overwritten_after_ms.bins", "garbage.by_request.held_block_s.max"} <= names
    assert {name.split(".")[0] for name in names} == set(summary) - {"schema_version"}
    for one in every:
        assert one.meaning.text, one.name
        assert "no explanation" not in one.meaning.text, one.name
        assert one.name in words
        assert one.meaning.text in words
    assert f"{summary['num_preemptions']:,}" in words


def test_every_name_of_the_documented_summary_has_a_meaning() -> None:
    """Two lists of one thing: the one in docs/results.md and the one in the report."""
    written = (REPOSITORY / "docs" / "results.md").read_text().partition("## `summary.json`")[2]
    table = written.partition("\n### ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 30
    assert [name for name in names if column_meaning(name) is None] == []
    pool = {"num_blocks": 1, "block_bytes": 1, "peak_blocks": 1, "num_refused": 0, "byte_seconds": 1.0}
    drafter = {**pool, "slot_seconds": {"context": 1.0, "drafts": 1.0, "slack": 1.0, "free": 1.0}}
    assert not [one for one in figures({"drafter_pool": drafter}) if "no explanation" in one.meaning.text]


def test_a_figure_that_is_not_known_is_shown_and_says_so() -> None:
    (one,) = figures({"brand_new": 3})
    assert (one.name, one.value) == ("brand_new", 3)
    assert "no explanation" in one.meaning.text


def test_columns_of_a_sweep_mean_what_the_summary_means() -> None:
    throughput, latency, room = (
        column_meaning(name) for name in ("output_throughput", "e2el_ms_p99", "slot_seconds_placeholder_rejected")
    )
    assert throughput is not None
    assert throughput.better == "more"
    assert throughput.unit == "tokens/s"
    assert latency is not None
    assert latency.better == "less"
    assert latency.unit == "ms"
    assert room is not None
    assert "rejected" in room.text
    assert column_meaning("drafter_pool_slot_seconds_free") is not None
    assert column_meaning("nothing_like_it") is None


def test_question_findings_settings_and_classes_are_text(folder: Path, page: str) -> None:
    words = "".join(Elements(page).words)
    assert "speculative decoding with eagle3 and K = 3" in words
    assert "60 requests at 60 a second" in words
    assert "60 of 60 requests finished" in words
    assert "engine.max_num_seqs" in words
    assert "ttft_ms 200, tpot_ms 40" in words
    for label, meaning in CLASSES.items():
        assert label.replace("_", " ") in words
        assert meaning in words
    asked = report_page(folder, question="Is it <worth> it?", blocks=False)
    assert "Is it &lt;worth&gt; it?" in asked
    assert "The map of blocks was left out." in asked


def test_the_data_are_those_of_the_tables(folder: Path, page: str) -> None:
    data = data_of(page)
    table = results.read_table(folder, "requests").sort_values("request")
    columns = data["requests"]["columns"]
    assert data["requests"]["num_rows"] == 60
    assert columns["id"] is None  # They are r0, r1, ...
    assert columns["num_output_tokens"] == table["num_output_tokens"].tolist()
    assert columns["arrival_us"] == (table["arrival_ns"] // 1000).tolist()
    first_token_ms = np.array(columns["first_token_us"]) / 1000
    assert first_token_ms == pytest.approx(table["ttft_ms"].to_numpy(), abs=0.0011)
    steps = data["steps"]
    assert steps["num_steps"] == len(results.read_table(folder, "steps"))
    bins = len(steps["edges_s"]) - 1
    classes = [steps["states"][f"res_{one['key']}"] for one in data["classes"]]
    whole = np.sum([np.broadcast_to(column, bins) for column in classes], axis=0)
    assert whole == pytest.approx(29 * 16, rel=1e-5)
    assert {one["label"]: one["colour"] for one in data["classes"]} == COLOURS


def test_times_of_preemptions_are_as_many_as_the_table_counts(folder: Path, page: str) -> None:
    table = results.read_table(folder, "requests").set_index("request")
    spans = data_of(page)["again"]["preemptions"]
    assert sum(map(len, spans.values())) == table["num_preemptions"].sum() > 0
    for request, times in spans.items():
        assert len(times) == table.loc[int(request), "num_preemptions"]
        # Only the last may not be admitted again: the output in flight at a preemption can be a request's last.
        flat = [time for span in times for time in span if time is not None]
        assert flat == sorted(flat)
        assert None not in [time for span in times for time in span][:-1]
        assert flat[0] >= table.loc[int(request), "first_scheduled_ns"] // 1000
        assert flat[-1] <= table.loc[int(request), "finish_ns"] // 1000


def test_the_same_folder_gives_the_same_page(folder: Path, page: str) -> None:
    assert report_page(folder) == page


def test_what_cannot_be_had_is_said(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "steps.parquet").unlink()
    (copy / "requests.parquet").unlink()
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest |= {"complete": False, "stopped_by": "interrupt", "scenario_digest": "0" * 64}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    page = report_page(copy)
    words = "".join(Elements(page).words)
    assert "incomplete: stopped by interrupt" in words
    assert "No pictures over time" in words
    assert "No requests to look at" in words
    assert "cannot be made again" in words
    data = data_of(page)
    assert (data["steps"], data["requests"], data["again"]) == (None, None, None)


@pytest.mark.parametrize("table", ["requests", "steps"])
def test_a_damaged_table_is_named_and_the_page_goes_without(folder: Path, tmp_path: Path, table: str) -> None:
    """Cut short, as by a full disk: the page is written, and what is wrong is said on it and in the terminal."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    whole = (copy / f"{table}.parquet").read_bytes()
    (copy / f"{table}.parquet").write_bytes(whole[: len(whole) // 2])
    done = CliRunner().invoke(app, ["report", str(copy), "-o", str(tmp_path / "page.html"), "--no-blocks"])
    assert done.exit_code == 0, done.output
    assert f"{copy / table}.parquet is damaged (" in done.stderr
    words = "".join(Elements((tmp_path / "page.html").read_text(encoding="utf-8")).words)
    assert f"{table}.parquet is damaged" in words
    (missing,) = write_report(copy, tmp_path / "page.html", blocks=False)
    assert "speckv run --force makes it again" in missing


def test_a_table_without_a_column_and_a_summary_without_a_figure(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    requests = pq.read_table(copy / "requests.parquet")
    pq.write_table(requests.drop_columns(["finish_ns"]), copy / "requests.parquet")
    (missing,) = write_report(copy, tmp_path / "page.html", blocks=False)
    assert "requests.parquet is damaged (it has no column 'finish_ns')" in missing
    summary = json.loads((copy / "summary.json").read_text())
    del summary["ttft_ms"]
    (copy / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ResultsError, match="it has no 'ttft_ms', which a report needs"):
        write_report(copy, tmp_path / "page.html", blocks=False)


# What it weighs and asks for


def test_it_asks_for_nothing(page: str, tmp_path: Path) -> None:
    for one in (page, report_page(make_sweep(tmp_path / "sweep"))):
        for tag, attributes in Elements(one).found:
            assert not {"src", "action", "data", "srcset", "poster"} & set(attributes), tag
            assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
            assert not [name for name in attributes if name.startswith("on")]
            assert (attributes.get("href") or "#").startswith("#")
        assert "@import" not in one
        assert not re.search(r"url\(", one.partition("<script")[0])
        assert "default-src 'none'" in one


def test_the_library_is_shipped_whole_with_its_licence(page: str) -> None:
    place = REPOSITORY / "sim" / "report"
    assert (place / "uplot.min.js").read_text() in page
    assert "Permission is hereby granted, free of charge" in page
    assert "Leon Sorokin" in page


def test_a_run_of_20000_requests_is_below_5_megabytes(folder: Path, tmp_path: Path) -> None:
    """Tables as a run of that size has them, with all digits different, and a map in which no two cells are alike."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    rng = np.random.default_rng(0)
    size = 20_000
    requests = results.read_table(copy, "requests").sample(size, replace=True, random_state=0, ignore_index=True)
    requests["request"] = np.arange(size)
    requests["id"] = [f"r{number}" for number in range(size)]
    requests["arrival_ns"] = np.sort(rng.integers(0, 3_000 * 10**9, size))
    for name, most in (("first_scheduled_ns", 10**10), ("first_token_ns", 10**10), ("finish_ns", 10**11)):
        requests[name] = requests["arrival_ns"] + rng.integers(0, most, size)
    for name, kind in requests.dtypes.items():
        if kind == "float64":
            requests[name] = rng.uniform(0.001, 99_999, size)
    for name in ("num_prompt_tokens", "num_output_tokens", "num_draft_tokens", "num_accepted_tokens", "num_deliveries"):
        requests[name] = rng.integers(100, 10_000, size)
    requests.to_parquet(copy / "requests.parquet")
    steps = results.read_table(copy, "steps")
    steps = steps.loc[steps.index.repeat(-(-100_000 // len(steps)))]
    steps["scheduled_ns"] = np.sort(rng.integers(0, 3_000 * 10**9, len(steps)))
    steps.to_parquet(copy / "steps.parquet")
    page = report_page(copy, blocks=False)
    assert data_of(page)["requests"]["num_rows"] == size
    noise = rng.integers(0, 256, (500, 500)).astype(np.uint8)
    preemptions = json.dumps({str(number): [[10**9, 10**9]] * 2 for number in range(size)})
    assert len(page.encode()) + 2 * len(runs(noise)) + len(preemptions) < MOST_BYTES


def test_values_are_packed() -> None:
    assert short(0.1234567) == 0.123457
    assert short(3.0) == 3
    assert isinstance(short(3.0), int)
    assert short(float("nan")) is None
    assert packed([2, 2, 2]) == 2
    assert packed([2, 3]) == [2, 3]
    assert numbers(pd.Series([1, None], dtype="Int64")) == [1, None]
    # 300 times 7, then one 2: a run is 255 long at most.
    flat = np.array([[7] * 300 + [2]], dtype=np.uint8)
    assert base64.b64decode(runs(flat)) == bytes([7, 255, 7, 45, 2, 1])
    assert base64.b64decode(runs(np.full((2, 255), 9, dtype=np.uint8))) == bytes([9, 255, 9, 255])
    assert runs(np.zeros((0, 4), dtype=np.uint8)) == ""


# Names are text


def evil_run(folder: Path, copy: Path) -> Path:
    """The run, with HTML wherever a scenario, a file or a table could carry a name."""
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest |= {"name": EVIL, "id": EVIL, "preset": EVIL, "warnings": [EVIL], "scenario_file": f"/a/{EVIL}"}
    manifest["inputs"] = [{"path": EVIL, "bytes": 1, "modified_ns": 1}]
    manifest["scenario"]["model"] = manifest["scenario"]["hardware"] = EVIL
    manifest["scenario"][EVIL] = {EVIL: EVIL}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    requests = results.read_table(copy, "requests")
    requests["id"] = EVIL
    requests.to_parquet(copy / "requests.parquet")
    return copy


def test_names_are_escaped(folder: Path, tmp_path: Path) -> None:
    honest = Elements(report_page(folder, blocks=False))
    evil = report_page(evil_run(folder, tmp_path / "copy"))
    tags = {tag for tag, _ in Elements(evil).found}
    assert tags <= {tag for tag, _ in honest.found}
    assert "<img" not in evil
    assert evil.count("<script") == 3
    assert data_of(evil)["requests"]["columns"]["id"] == [EVIL] * 60
    sweep = report_page(make_sweep(tmp_path / "sweep", evil=True))
    assert "<img" not in sweep
    assert sweep.count("<script") == 3
    assert data_of(sweep)["axes"][2]["values"] == EVIL


def test_nothing_in_the_data_can_end_its_element() -> None:
    written = embedded({EVIL: [EVIL, "<!--", "]]>"]})
    assert not set(written) & {"<", ">", "&", "\u2028"}
    assert json.loads(written) == {EVIL: [EVIL, "<!--", "]]>"]}


# The command


def test_the_command_writes_the_page(folder: Path, page: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text() == page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "neither").mkdir()
    (tmp_path / "neither" / "manifest.json").write_text("{}")
    (tmp_path / "against").mkdir()
    (tmp_path / "against" / "comparison.json").write_text('{"changes": ["K=1"], "seeds": [0, 1]}')
    (tmp_path / "nearly").mkdir()
    (tmp_path / "nearly" / "manifest.json").write_text('{"num_points": 3}')
    for wrong, code, words in (
        (tmp_path / "nowhere", 2, "cannot read"),
        (tmp_path / "neither", 2, "neither that of a run nor that of a sweep"),
        (tmp_path / "nearly", 2, "nearly"),
        (tmp_path / "against", 2, "is a comparison, and neither a run nor a sweep; speckv run SCENARIO --against K=1 "),
    ):
        done = CliRunner().invoke(app, ["report", str(wrong), "-o", str(tmp_path / "x.html")])
        assert done.exit_code == code, done.output
        assert words in done.stderr
    done = CliRunner().invoke(app, ["report", str(folder), "--no-blocks", "-o", str(tmp_path / "none" / "x.html")])
    assert done.exit_code == 1
    assert "cannot write" in done.stderr
    assert not (tmp_path / "x.html").exists()


# In a browser


def _chromium() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium = _chromium()
    program = chromium.find_chromium()
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(chromium.NAMES)}")
    with chromium.Chromium(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def run_file(page: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "run.html"
    file.write_text(page)
    return file


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    write_report(make_sweep(place / "sweep"), place / "sweep.html")
    return place / "sweep.html"


def check_quiet(browser: Any) -> None:
    """The page has drawn everything, and nobody complains."""
    assert browser.value("document.documentElement.hasAttribute('data-ready')")
    assert browser.value("document.getElementById('problems').hidden")
    assert browser.complaints == []
    assert browser.requested == []


def shades(browser: Any, picture: str) -> dict[str, int]:
    """How many pixels of a picture have which colour, the rarer ones left out."""
    counts: dict[str, int] = browser.value(
        f"""(() => {{
            const canvas = document.querySelector('[data-picture="{picture}"] canvas');
            const copy = document.createElement('canvas');
            [copy.width, copy.height] = [canvas.width, canvas.height];
            const context = copy.getContext('2d', {{willReadFrequently: true}});
            context.drawImage(canvas, 0, 0);
            const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
            const counts = {{}};
            for (let i = 0; i < data.length; i += 4) {{
                if (data[i + 3] < 255) continue;
                const name = '#' + [0, 1, 2].map(j => data[i + j].toString(16).padStart(2, '0')).join('').toUpperCase();
                counts[name] = (counts[name] || 0) + 1;
            }}
            return Object.fromEntries(Object.entries(counts).filter(([, n]) => n > 20));
        }})()"""
    )
    return counts


def texts(browser: Any, selector: str) -> list[str]:
    found: list[str] = browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
    return found


def choose(browser: Any, label: str, value: str, within: str = "") -> None:
    selector = f"{within} select[aria-label={json.dumps(label)}]"
    browser.value(
        f"(() => {{const s = document.querySelector({json.dumps(selector)}); s.value = {json.dumps(value)};"
        "s.dispatchEvent(new Event('change'))})()"
    )
    browser.frame()


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_pictures_of_a_run_are_drawn(browser: Any, run_file: Path, width: int, dark: bool) -> None:
    browser.open(run_file, width, dark=dark)
    check_quiet(browser)
    assert browser.value("document.documentElement.scrollWidth") <= width
    pool = shades(browser, "pool")
    free = "#2C3137" if dark else COLOURS["free"]
    for colour in (COLOURS["committed"], COLOURS["placeholder"], free):
        assert pool.get(colour, 0) > 100, colour
    assert shades(browser, "speculative")[COLOURS["lookahead"]] > 100
    assert {COLOURS["committed"], "#D55E00"} & set(shades(browser, "queues"))
    assert shades(browser, "tokens")["#009E73"] > 20
    blocks = shades(browser, "blocks")
    assert blocks[COLOURS["committed"]] > 1000
    assert blocks[free] > 100
    assert shades(browser, "latency")["#56B4E9"] > 100


def test_pointing_shows_what_is_there(browser: Any, run_file: Path) -> None:
    browser.open(run_file)
    browser.mouse("mouseMoved", *browser.middle('[data-picture="pool"] .u-over'))
    browser.frame()
    at, *entries = texts(browser, '[data-picture="pool"] .readout > *')
    assert at.startswith("at ")
    shares = [float(entry.split()[-2]) for entry in entries]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert texts(browser, '[data-picture="queues"] .at')[0].startswith("at ")  # They are pointed at together.
    browser.mouse("mouseMoved", *browser.middle('[data-picture="blocks"] .u-over'))
    browser.frame()
    assert re.match(
        r"block \d+ at [\d.]+ s: \w+.* of 16 slots garbage", texts(browser, '[data-picture="blocks"] .detail')[0]
    )
    check_quiet(browser)


def test_zoom_holds_for_all_pictures_over_time(browser: Any, run_file: Path) -> None:
    browser.open(run_file)
    (whole,) = texts(browser, "#shown")
    browser.drag('[data-picture="pool"] .u-over', 0.25)
    (part,) = texts(browser, "#shown")
    assert part != whole
    low, high = (float(number) for number in re.findall(r"[\d.]+", part))
    first, last = (float(number) for number in re.findall(r"[\d.]+", whole))
    assert (high - low) / (last - first) == pytest.approx(0.25, abs=0.02)
    before = shades(browser, "blocks")
    browser.click('[data-picture="zoom"] button', 4)
    assert texts(browser, "#shown") == [whole]
    assert shades(browser, "blocks") != before
    browser.click('[data-picture="zoom"] button', 0)
    low, high = (float(number) for number in re.findall(r"[\d.]+", texts(browser, "#shown")[0]))
    assert (high - low) / (last - first) == pytest.approx(0.5, abs=0.02)
    check_quiet(browser)


def test_classes_can_be_hidden(browser: Any, run_file: Path) -> None:
    browser.open(run_file)
    assert COLOURS["committed"] in shades(browser, "pool")
    browser.click('[data-picture="pool"] .readout button', 0)
    assert COLOURS["committed"] not in shades(browser, "pool")
    browser.click('[data-picture="pool"] .readout button', 0)
    assert COLOURS["committed"] in shades(browser, "pool")
    browser.click('[data-picture="blocks"] .controls button', 1)
    assert COLOURS["committed"] not in shades(browser, "blocks")
    check_quiet(browser)


def test_light_and_dark_can_be_switched(browser: Any, run_file: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    browser.open(run_file, dark=True)
    assert browser.value(back) == "rgb(20, 23, 26)"
    browser.click("#theme")
    assert browser.value(back) == "rgb(255, 255, 255)"
    assert COLOURS["free"] in shades(browser, "pool")
    browser.click("#theme")
    assert browser.value(back) == "rgb(20, 23, 26)"
    assert COLOURS["free"] not in shades(browser, "pool")
    browser.value("localStorage.clear()")
    check_quiet(browser)


def test_requests_can_be_sorted_searched_and_turned(browser: Any, run_file: Path, folder: Path) -> None:
    table = results.read_table(folder, "requests").sort_values("request").set_index("id")
    browser.open(run_file)
    ids = "[data-picture=requests] td.id"
    assert texts(browser, ids) == [f"r{number}" for number in range(25)]
    browser.click("[data-picture=requests] > .controls:last-child button", 1)
    assert texts(browser, ids)[0] == "r25"
    browser.click("[data-picture=requests] th button", 4)
    longest = table.sort_values(["num_output_tokens", "request"], ascending=[False, True]).index[:25].tolist()
    assert texts(browser, ids) == longest
    assert (
        browser.value("document.querySelectorAll('[data-picture=requests] th')[4].getAttribute('aria-sort')")
        == "descending"
    )
    choose(browser, "Which of them", "1")
    preempted = int((table["num_preemptions"] > 0).sum())
    assert texts(browser, "[data-picture=requests] [role=status]") == [f"{preempted} of 60"]
    choose(browser, "Which of them", "0")
    browser.value(
        "(() => {const s = document.querySelector('[data-picture=requests] input'); s.value = 'R1';"
        "s.dispatchEvent(new Event('input'))})()"
    )
    assert sorted(texts(browser, ids)) == sorted(name for name in table.index if "r1" in name)
    check_quiet(browser)


def test_a_request_tells_its_story(browser: Any, run_file: Path, folder: Path) -> None:
    table = results.read_table(folder, "requests")
    browser.open(run_file)
    browser.click("[data-picture=requests] th button", 9)
    browser.click("[data-picture=requests] td.id button", 0)
    (first, *_) = texts(browser, "[data-picture=requests] td.id")
    row = table.set_index("id").loc[first]
    assert row["num_preemptions"] == table["num_preemptions"].max()
    (story,) = texts(browser, ".story")
    assert story.count("is preempted") == row["num_preemptions"]
    assert f"arrives with {row['num_prompt_tokens']} tokens of prompt" in story
    assert f"ends with {row['num_output_tokens']} tokens of output" in story
    assert f"--request {first}" in story
    bar = browser.value("document.querySelector('.life').getBoundingClientRect().width")
    parts = browser.value(
        "[...document.querySelectorAll('.life i')].reduce((s, e) => s + e.getBoundingClientRect().width, 0)"
    )
    assert parts == pytest.approx(bar, rel=0.02)
    browser.click("[data-picture=requests] td.id button", 0)
    assert texts(browser, ".story") == []
    check_quiet(browser)


def test_latencies_can_be_chosen(browser: Any, run_file: Path, folder: Path) -> None:
    table = results.read_table(folder, "requests")
    kept = (table["ttft_ms"] <= 200).mean()
    browser.open(run_file)
    words = "[data-picture=latency] .detail:not(.hover)"
    assert f"kept by {kept:.1%}".replace("%", " %") in texts(browser, words)[0]
    before = shades(browser, "latency")
    browser.click("[data-picture=latency] .controls button", 3)
    assert texts(browser, words)[0].startswith("end to end")
    assert f"median {table['e2el_ms'].median():.4g} ms" in texts(browser, words)[0]
    assert shades(browser, "latency") != before
    check_quiet(browser)


def test_it_prints_in_light_colours(browser: Any, run_file: Path, sweep_file: Path, tmp_path: Path) -> None:
    for file in (run_file, sweep_file):
        browser.open(file, dark=True)
        browser.print(tmp_path / "page.pdf")
        assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
        browser.ask("Emulation.setEmulatedMedia", media="print")
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        browser.ask("Emulation.setEmulatedMedia", media="")
        check_quiet(browser)


def test_the_map_of_a_sweep_shows_the_best_k_at_each_load(browser: Any, sweep_file: Path) -> None:
    browser.open(sweep_file)
    check_quiet(browser)
    assert texts(browser, ".heat thead th") == ["K ↓ rate →", "1", "8"]
    cells = texts(browser, ".heat td")
    # Means over both seeds; of K = 6 at rate 1 a run failed.
    assert cells == ["161", "901", "181", "881", "201", "861", "180 *", "841"]
    assert texts(browser, ".heat .best") == ["901", "201"]
    answer = texts(browser, "[data-picture=answer] li")
    assert answer[0].startswith(
        "Best output_throughput at rate 1 (with model a): K = 4 (201 tokens/s), by up to 24.8 %"
    )
    assert answer[1].startswith("Best output_throughput at rate 8 (with model a): K = 0 (901 tokens/s)")
    browser.click(".heat td button", 6)
    assert "180 tokens/s (180 to 180 in 1 runs)" in texts(browser, "[data-picture=map] .detail")[0]
    assert "1 runs failed" in texts(browser, "[data-picture=map] .detail")[0]
    choose(browser, "As", "relative")
    assert texts(browser, ".heat td")[4:6] == ["+24.8 %", "−4.4 %"]
    choose(browser, "Figure", "tpot_ms_mean")
    choose(browser, "As", "value")
    assert texts(browser, ".heat td")[:2] == ["11", "18"]
    assert shades(browser, "lines")
    check_quiet(browser)


def test_the_pareto_front_is_the_right_one(browser: Any, sweep_file: Path) -> None:
    """Less time a token is better, more throughput is: at rate 1 K = 4 is best, at rate 8 K = 0."""
    browser.open(sweep_file)
    assert "2 of 8 points lie on the front" in texts(browser, "[data-picture=pareto] .detail")[0]
    assert len(shades(browser, "pareto")) >= 3
    choose(browser, "rate", "1", "[data-picture=pareto]")
    assert "1 of 4 points lie on the front" in texts(browser, "[data-picture=pareto] .detail")[0]
    check_quiet(browser)


@pytest.mark.parametrize("width", [390, 1200])
def test_a_sweep_fits_and_its_points_can_be_opened(browser: Any, sweep_file: Path, width: int) -> None:
    browser.open(sweep_file, width, dark=width == 390)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert len(texts(browser, "[data-picture=points] tbody tr")) == 8
    choose(browser, "Which of them", "1")
    assert texts(browser, "[data-picture=points] td.id") == ["3"]
    browser.click("[data-picture=points] td.id button")
    assert "seed 1: failed: no" in texts(browser, ".story")[0]
    check_quiet(browser)


def test_names_stay_text_in_the_browser(browser: Any, folder: Path, tmp_path: Path) -> None:
    write_report(evil_run(folder, tmp_path / "copy"), tmp_path / "run.html")
    write_report(make_sweep(tmp_path / "sweep", evil=True), tmp_path / "sweep.html")
    for name, table in (("run", "requests"), ("sweep", "points")):
        browser.open(tmp_path / f"{name}.html")
        choose(browser, "Which of them", "1" if name == "sweep" else "0")
        browser.click(f"[data-picture={table}] td.id button")
        assert EVIL in texts(browser, ".story")[0]
        assert browser.value("typeof window.taken") == "undefined"
        assert browser.value("document.images.length") == 0
        assert browser.value("document.scripts.length") == 3
        check_quiet(browser)


def test_a_page_without_pictures_works(browser: Any, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "steps.parquet").unlink()
    write_report(copy, tmp_path / "run.html", blocks=False)
    browser.open(tmp_path / "run.html")
    check_quiet(browser)
    browser.click("[data-picture=requests] td.id button")
    assert "arrives with" in texts(browser, ".story")[0]
    check_quiet(browser)
