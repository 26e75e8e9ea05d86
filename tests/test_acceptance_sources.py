"""Sources of acceptance as vLLM 0.32 writes them, damaged ones, and the command that fits them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim.acceptance_sources import read_sources
from sim.commands.acceptance import app
from sim.models.acceptance import AcceptanceError
from sim.models.acceptance_fit import Counts, Figures, Steps
from sim.scenario import load_scenario

SAMPLES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "vllm_formats"
PREFIX = "(APIServer pid=4242) INFO 03-05 12:00:10 [metrics.py:125] "
# 8 drafts of K = 3: 6, 4 and 3 accepted by position, 13 of 24 in all.
LINE = (
    "SpecDecoding metrics: Mean acceptance length: 2.62, Accepted throughput: 1.30 tokens/s, Drafted throughput: 2.40 "
    "tokens/s, Accepted: 13 tokens, Drafted: 24 tokens, Per-position acceptance rate: 0.750, 0.500, 0.375, Avg Draft "
    "acceptance rate: 54.2%"
)
# One draft of K = 2, both accepted.
SHORT = (
    "SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 0.20 tokens/s, Drafted throughput: 0.20 "
    "tokens/s, Accepted: 2 tokens, Drafted: 2 tokens, Per-position acceptance rate: 1.000, 1.000, Avg Draft acceptance "
    "rate: 100.0%"
)
IDLE = LINE.replace("2.62", "nan").replace("13 tokens", "0 tokens").replace("24 tokens", "0 tokens")


def scrape(drafts: float, *accepted: float, engine: int = 0) -> str:
    labels = f'engine="{engine}",model_name="demo"'
    lines = [
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * len(accepted)}",
    ]
    for position, count in enumerate(accepted):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {count}')
    return "\n".join(lines) + "\n"


def written(folder: Path, text: str, name: str = "source.txt") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def counts(source: Any) -> list[float]:
    assert isinstance(source.evidence, Counts)
    return [float(source.evidence.num_drafts.sum()), *source.evidence.accepted.sum(axis=0).tolist()]


def test_a_log_with_engines_restarts_cut_lines_and_others_between(tmp_path: Path) -> None:
    lines = [
        "INFO 03-05 12:00:00 Starting vLLM",
        PREFIX + LINE,
        "(APIServer pid=4242) INFO Engine 000: Running: 24 reqs",
        PREFIX.replace("4242", "17") + LINE,
        PREFIX + LINE[:170],  # cut
        "INFO 03-05 13:00:00 Starting vLLM",
        PREFIX + IDLE,
        "2026-03-05T12:00:10Z pod-7 " + PREFIX + LINE,
        PREFIX + LINE.replace("0.500", "0.9x0"),
    ]
    source = read_sources([written(tmp_path, "\n".join(lines))])
    assert source.kind == "log"
    assert counts(source) == [24, 18, 12, 9]
    assert any("2 lines were cut or malformed" in note and "source.txt:5" in note for note in source.notes)
    assert any("1 intervals without drafts" in note for note in source.notes)
    assert any("engines or processes" in note for note in source.notes)


def test_a_log_with_two_k(tmp_path: Path) -> None:
    log = written(tmp_path, f"{LINE}\r\n{SHORT}\r\n{LINE}\r\n")
    source = read_sources([log])
    assert counts(source) == [16, 12, 8, 6]
    assert "several K (K = 2: 1 drafts, K = 3: 16 drafts)" in source.notes[0]
    assert counts(read_sources([log], k=2)) == [1, 1, 1]
    with pytest.raises(AcceptanceError, match="was made with K = 3, and k = 7"):
        read_sources([log], k=7)


def test_a_gzipped_log(tmp_path: Path) -> None:
    file = tmp_path / "log.gz"
    file.write_bytes(gzip.compress((LINE + "\n").encode()))
    assert counts(read_sources([str(file)])) == [8, 6, 4, 3]
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(AcceptanceError, match="damaged archive"):
        read_sources([str(file)])


def test_a_scrape_and_two_to_subtract(tmp_path: Path) -> None:
    before = written(tmp_path, scrape(8, 6, 4, 3) + scrape(2, 1, 1, 0, engine=1), "before.prom")
    after = written(tmp_path, scrape(20, 15, 10, 6) + scrape(2, 1, 1, 0, engine=1), "after.prom")
    assert counts(read_sources([before])) == [10, 7, 5, 3]
    assert counts(read_sources([before, after])) == [12, 9, 6, 3]
    with pytest.raises(AcceptanceError, match="earlier scrape comes first"):
        read_sources([after, before])
    with pytest.raises(AcceptanceError, match="3 scrapes"):
        read_sources([before, after, before])


def test_benchmark_results(tmp_path: Path) -> None:
    result = {
        "spec_decode_num_drafts": 8,
        "spec_decode_draft_tokens": 24,
        "spec_decode_acceptance_length": 2.625,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5, 0.375],
    }
    assert counts(read_sources([written(tmp_path, json.dumps(result))])) == [8, 6, 4, 3]
    pretty = written(tmp_path, json.dumps(result, indent=1), "result.json")
    assert counts(read_sources([pretty])) == [8, 6, 4, 3]
    del result["spec_decode_num_drafts"]
    rates = read_sources([written(tmp_path, json.dumps(result))]).evidence
    assert rates == Figures(3, (0.75, 0.5, 0.375))
    result["spec_decode_per_position_acceptance_rates"] = [0.75, 1.5, 0.375]
    with pytest.raises(AcceptanceError, match=r"rates\[1\] = 1.5: must be between 0 and 1"):
        read_sources([written(tmp_path, json.dumps(result))])


def test_requests_with_per_step_accepted(tmp_path: Path) -> None:
    one = {"metrics": {"speculative_decoding": {"num_spec_tokens": 3, "per_step_accepted": [3, 0, 1]}}}
    two = {"per_step_accepted": [0, 2], "per_step_drafted": [0, 3]}
    entries: list[dict[str, Any]] = [one, {"metrics": {}}, two]
    lines = "\n".join(map(json.dumps, entries))
    source = read_sources([written(tmp_path, lines, "requests.jsonl")])
    assert isinstance(source.evidence, Steps)
    assert [a.tolist() for a in source.evidence.accepted] == [[3, 0, 1], [0, 2]]
    assert source.evidence.drafted is not None
    assert [d.tolist() for d in source.evidence.drafted] == [[True, True, True], [False, True]]
    assert "1 requests without a verification" in source.notes[0]
    alone = read_sources([written(tmp_path, json.dumps(one, indent=2), "one.json")])
    assert isinstance(alone.evidence, Steps)
    assert (alone.evidence.k, alone.evidence.drafted) == (3, None)


def test_a_recording(tmp_path: Path) -> None:
    lines = [
        {"eagle3_tokens_per_step": [1, 4, 3, 2, 1, 2, 1], "ngram_tokens_per_step": [1] * 7},
        {"eagle3_tokens_per_step": [1] * 4000, "ngram_tokens_per_step": [1] * 4000},
    ]
    file = written(tmp_path, "\n".join(map(json.dumps, lines)), "recorded.jsonl")
    source = read_sources([file], k=2)
    assert isinstance(source.evidence, Steps)
    assert [a.tolist() for a in source.evidence.accepted] == [[2, 0]]
    assert "1 requests of 4000 tokens or more (loops) were left out" in source.notes
    ngram = read_sources([file], k=2, drafter="ngram").evidence
    assert isinstance(ngram, Steps)
    assert ngram.accepted[0].tolist() == [0] * 5
    with pytest.raises(AcceptanceError, match="say which, with -k"):
        read_sources([file])


def test_numbers_typed_in() -> None:
    assert read_sources(["rates=0.67,0.435"]).evidence == Figures(2, (0.67, 0.435))
    conditional = read_sources(["conditional=0.5,0.5"]).evidence
    assert isinstance(conditional, Figures)
    assert conditional.rates == pytest.approx((0.5, 0.25))
    assert read_sources(["length=2.4"], k=3).evidence == Figures(3, None, 2.4)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "a.txt", "is empty"),
        ("nothing here\nat all\n", "a.txt", "holds nothing about drafts"),
        (PREFIX + LINE[:100], "a.log", r"1 of them cut or malformed \(first: .*a.log:1\)"),
        (IDLE, "a.log", "1 of idle intervals"),
        (scrape(8, 6, 4).replace(" 8\n", " eight\n"), "a.prom", "a.prom:2: value 'eight'"),
        (scrape(8, 6, 4).replace(" 8\n", " -8\n"), "a.prom", "a.prom:2: value '-8'"),
        (scrape(8, 6, 4).replace(" 8\n", " NaN\n"), "a.prom", "a.prom:2: value 'NaN'"),
        (scrape(8, 6, 4).replace('position="1"', 'position="2"'), "a.prom", "positions 0, 2: expected 0 to K - 1"),
        (scrape(8, 6, 4).replace(',position="1"', ""), "a.prom", "a.prom:6"),
        (scrape(8, 4, 6), "a.prom", "cannot rise"),
        (scrape(0, 0, 0), "a.prom", "counts no drafts"),
        (scrape(8, 6, 4).replace("num_drafts_total", "other_total"), "a.prom", "a.prom:2"),
        ('{"per_step_accepted": [1, 2}', "a.jsonl", "a.jsonl:1: malformed JSON"),
        ('{"per_step_accepted": [1]}\n{"per_step_accepted": [1,', "a.jsonl", "a.jsonl:2: malformed JSON"),
        ('{"per_step_accepted": [1, -2]}', "a.jsonl", r"a.jsonl: entry 0|a.jsonl:1: per_step_accepted\[1\] = -2"),
        ('{"per_step_accepted": [1, 2], "per_step_drafted": [3]}', "a.jsonl", "per_step_drafted has 1 entries"),
        ('{"per_step_accepted": [4], "per_step_drafted": [3]}', "a.jsonl", "at most the 3 that were drafted"),
        ('{"per_step_accepted": []}', "a.jsonl", "no request has per_step_accepted"),
        ('{"spec_decode_per_position_acceptance_rates": []}', "a.json", "expected a list of rates"),
        ('{"spec_decode_per_position_acceptance_rates": [0.4, 0.5]}', "a.json", "cannot rise"),
        ('{"spec_decode_acceptance_length": 2.5}', "a.json", "K cannot be told"),
        ('{"spec_decode_acceptance_length": 2.5', "a.json", "a.json:1: malformed JSON"),
    ],
)
def test_malformed_sources_say_where_and_what(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(AcceptanceError, match=message):
        read_sources([written(tmp_path, text, name)])


@pytest.mark.parametrize(
    ("sources", "k", "message"),
    [
        (["rates=0.5,x"], None, "expected numbers with commas"),
        (["rates=0.5,0.6"], None, "cannot rise"),
        (["rates=1.5"], None, "must be between 0 and 1"),
        (["length=2.5"], None, "needs -k"),
        (["length=9"], 3, "from 1 to 4"),
        (["rates=0.5", "rates=0.4"], None, "one source"),
        (["rates=0.5"], 3, "k = 3 was asked for"),
        (["/no/such/file"], None, "cannot be read"),
        ([], None, "no source"),
    ],
)
def test_malformed_names(sources: list[str], k: int | None, message: str) -> None:
    with pytest.raises(AcceptanceError, match=message):
        read_sources(sources, k)


def test_sources_of_two_kinds_are_refused(tmp_path: Path) -> None:
    log, prom = written(tmp_path, LINE, "a.log"), written(tmp_path, scrape(8, 6), "a.prom")
    with pytest.raises(AcceptanceError, match="of one kind"):
        read_sources([log, prom])


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="samples of vLLM's formats (../shared/data/vllm_formats) are not here")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm_log_synthetic.txt", "log"),
        ("vllm_metrics_synthetic.prom", "metrics"),
        ("vllm_bench_serve_detailed_synthetic.json", "bench"),
        ("vllm_response_metrics_synthetic.json", "requests"),
    ],
)
def test_the_samples_say_the_same(name: str, kind: str) -> None:
    source = read_sources([str(SAMPLES / name)])
    assert source.kind == kind
    if isinstance(source.evidence, Counts):
        assert counts(source) == [8, 6, 4, 3]
    else:
        assert isinstance(source.evidence, Steps)
        accepted = source.evidence.accepted[0]
        assert [int((accepted >= i).sum()) for i in (0, 1, 2, 3)] == [8, 6, 4, 3]


# The command


def speckv(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_fit_writes_what_a_scenario_reads(tmp_path: Path) -> None:
    log = written(tmp_path, "\n".join([LINE] * 10))
    file, picture = tmp_path / "fit.yaml", tmp_path / "fit.png"
    code, out, err = speckv("fit", log, "--model", "per_position", "-o", str(file), "--picture", str(picture))
    assert (code, err) == (0, "")
    assert "per_position" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    acceptance = load_scenario(file).acceptance
    assert acceptance is not None
    assert acceptance.model == "per_position"
    assert np.cumprod(acceptance.rates).tolist() == pytest.approx([0.75, 0.5, 0.375], abs=1e-5)
    code, out, err = speckv("export", str(file), "-k", "3")
    assert code == 0
    flag, _, value = out.strip().partition(" ")
    assert flag == "--speculative-config"
    config = json.loads(value.strip("'"))
    assert config["rejection_sample_method"] == "synthetic"
    assert config["num_speculative_tokens"] == 3
    assert config["synthetic_acceptance_rates"] == pytest.approx([0.75, 0.5, 0.375])


MODEL_SECTIONS: list[dict[str, Any]] = [
    {"model": "beta", "alpha": 4, "beta": 2},
    {"model": "markov", "rates": [[0.5, 0.5], [0.5, 0.5], [0.6, 0.6]], "request_sigma": 0.1},
    {"model": "hidden_markov", "transitions": [[0.9, 0.1], [0.1, 0.9]], "rates": [[0.5, 0.5], [0.8, 0.8]]},
    {"model": "match_and_run", "start": 0.1, "again": 0.2, "rates": [0.5, 0.7]},
    {"model": "drift", "rate": 0.5, "slope": 0.2},
    {"model": "tree", "rates": [0.5, 0.5], "widths": [2, 1]},
    {"model": "mixture", "classes": [{"weight": 1, "acceptance": {"model": "geometric", "rate": 0.5}}]},
    {"model": "profile", "name": "eagle3-sharegpt"},
]


@pytest.mark.parametrize("section", MODEL_SECTIONS, ids=[s["model"] for s in MODEL_SECTIONS])
def test_every_model_can_stand_in_a_scenario(section: dict[str, Any], tmp_path: Path) -> None:
    scenario = {
        "engine": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}},
        "acceptance": section,
    }
    file = written(tmp_path, json.dumps(scenario), "scenario.yaml")
    code, out, err = speckv("export", file)
    assert code == 0, err
    rates = json.loads(out.partition(" ")[2].strip().strip("'"))["synthetic_acceptance_rates"]
    assert len(rates) == 2
    assert 1 >= rates[0] >= rates[1] >= 0


def test_the_json_says_what_was_not_fitted(tmp_path: Path) -> None:
    code, out, _ = speckv("fit", "rates=0.7,0.5", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["fits"][0]["model"] == "per_position"
    assert told["fits"][0]["unconditional_rates"] == pytest.approx([0.7, 0.5], abs=1e-5)
    assert "beta" in told["not_fitted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "rates=2"], "must be between 0 and 1"),
        (["fit", "rates=0.5", "--model", "beta"], "needs more than a few rates"),
        (["fit", "rates=0.5", "--model", "guess"], "is not known"),
        (["fit", "rates=0.5", "--widths", "a"], "expected whole numbers"),
        (["fit", "rates=0.5", "--widths", "1,2", "--model", "tree"], "needs 1 widths"),
        (["fit", "rates=0.5", "-o", "/no/such/folder/x.yaml"], "cannot write"),
        (["export", "no-such-scenario"], "no scenario of that name"),
    ],
)
def test_bad_input_is_one_message_and_code_2(arguments: list[str], message: str) -> None:
    code, out, err = speckv(*arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_profiles_name_their_sources() -> None:
    code, out, _ = speckv("profiles", "--json")
    assert code == 0
    rows = json.loads(out)
    assert all(row["source"] for row in rows)
    assert {"eagle3-sharegpt", "mtp-deepseek-v3", "draft-qwen3-1.7b", "ngram-blazedit"} <= {row["name"] for row in rows}
    assert "eagle3-sharegpt" in speckv("profiles")[1]
