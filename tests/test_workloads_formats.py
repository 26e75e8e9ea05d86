"""Every trace format: a sample by hand, damaged copies of it, and the same for the published files where they lie near.

The samples are made up; what they must read as is worked out by hand beside them.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workloads.sharegpt import ShareGPT
from workloads.spec import RequestSpec, output_stream, prompt_stream, trace_stream
from workloads.token_counts import estimated_tokens, token_counter
from workloads.trace_formats import FORMATS
from workloads.traces import Columns, Trace, TraceError, detect_format

BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


class Sample(NamedTuple):
    """A made-up file, and what it reads as: (arrival in ns, prompt, output) of each request."""

    text: str
    reads: list[tuple[int, int, int]]
    left_out: dict[str, int] = {}  # noqa: RUF012 - a default that nobody changes
    name: str = "trace"


def json_lines(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SAMPLES: dict[str, Sample] = {
    "azure": Sample(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:51.2224670,879,55\n2023-11-16 18:15:51.3910170,91,16\n",
        [(0, 374, 44), (4_314_579_000, 396, 109), (4_541_877_000, 879, 55), (4_710_427_000, 91, 16)],
    ),
    "burstgpt": Sample(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
        "47,GPT-4,300,0,300,API log\n118.5,GPT-4,417,276,693,Conversation log\n",
        [(0, 472, 18), (40_000_000_000, 1087, 230), (113_500_000_000, 417, 276)],
        {"failed requests": 1},
    ),
    "mooncake": Sample(
        json_lines(
            {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
            {"timestamp": 30, "input_length": 512, "output_length": 6, "hash_ids": [7]},
            {"timestamp": 31, "input_length": 20, "output_length": 1, "hash_ids": [9]},
            {"timestamp": 45, "input_length": 21, "output_length": 2, "hash_ids": [10]},
        ),
        [(0, 600, 5), (30_000_000, 512, 6), (31_000_000, 20, 1), (45_000_000, 21, 2)],
    ),
    "llmservingsim": Sample(
        json_lines(
            {"input_toks": 100, "output_toks": 5, "arrival_time_ns": 1_000},
            {"input_toks": 200, "output_toks": 6, "arrival_time_ns": 4_000},
            {"input_toks": 300, "output_toks": 7, "arrival_time_ns": 5_500},
            {"input_toks": 400, "output_toks": 8, "arrival_time_ns": 9_000},
        ),
        [(0, 100, 5), (3_000, 200, 6), (4_500, 300, 7), (8_000, 400, 8)],
    ),
    "vidur": Sample(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n5.8926549999999995,879,55\n"
        "1e1,91,16\n",
        [(0, 374, 44), (4_314_579_000, 396, 109), (5_892_655_000, 879, 55), (10_000_000_000, 91, 16)],
    ),
    "vllm_bench": Sample(
        json.dumps(
            {
                "backend": "vllm",
                "input_lens": [100, 200, 300, 400],
                "output_lens": [6, 5, 0, 9],
                "itls": [[0.02, 0.021], [0.019]],
                "start_times": [50.25, 50.0, 50.5, 51.0],
                "errors": ["", "", "gone", ""],
            }
        ),
        [(0, 200, 5), (250_000_000, 100, 6), (1_000_000_000, 400, 9)],
        {"failed requests": 1},
    ),
    "guidellm": Sample(
        json.dumps(
            {
                "metadata": {"version": 1},
                "benchmarks": [
                    {
                        "type_": "generative_benchmark",
                        "requests": {
                            "successful": [
                                {"request_start_time": 20.5, "prompt_tokens": 10, "output_tokens": 3},
                                {
                                    "info": {"timings": {"request_start": 20.0}},
                                    "input_metrics": {"text_tokens": 11},
                                    "output_metrics": {"total_tokens": 4},
                                },
                                {"start_time": 21.0, "prompt_tokens": 12, "output_tokens": 5},
                            ],
                            "incomplete": [{"prompt_tokens": 9}],
                            "errored": [],
                            "total": None,
                        },
                    },
                    {"requests": {"successful": [{"start_time": 40.0, "prompt_tokens": 13, "output_tokens": 6}]}},
                ],
            }
        ),
        [(0, 11, 4), (500_000_000, 10, 3), (1_000_000_000, 12, 5), (20_000_000_000, 13, 6)],
        {"failed requests": 1},
    ),
    "columns": Sample(
        "prompt_tokens,arrival_ms,output_tokens\n5,1.5,1\n6,2,2\n7,2.25,3\n8,1000,4\n",
        [(0, 5, 1), (500_000, 6, 2), (750_000, 7, 3), (998_500_000, 8, 4)],
    ),
}


def write(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **options: Any) -> list[tuple[int, int, int]]:
    trace = Trace(path, **options)
    return [(spec.arrival_ns, spec.num_prompt_tokens, spec.max_tokens) for spec in trace.arrivals()]


# --- right files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", SAMPLES)
@pytest.mark.parametrize("dress", ["plain", "gzip", "gzip by its bytes", "byte-order mark", "CRLF", "no last line end"])
def test_samples_read_as_worked_out(tmp_path: Path, format: str, dress: str) -> None:
    sample = SAMPLES[format]
    content = sample.text.encode()
    name = "trace.gz" if dress == "gzip" else "trace"
    match dress:
        case "gzip" | "gzip by its bytes":
            content = gzip.compress(content)
        case "byte-order mark":
            content = b"\xef\xbb\xbf" + content
        case "CRLF":
            content = content.replace(b"\n", b"\r\n")
        case "no last line end":
            content = content.rstrip(b"\n")
    path = write(tmp_path, content, name)
    assert detect_format(path) == format
    trace = Trace(path)
    assert read(path) == sample.reads
    assert trace.check() == trace.num_requests == len(sample.reads)
    assert trace.left_out == sample.left_out
    assert read(path, format=format, max_requests=2) == sample.reads[:2]


def test_every_format_has_a_sample() -> None:
    assert {*SAMPLES, "sharegpt"} == set(FORMATS)


def test_columns_of_ones_own(tmp_path: Path) -> None:
    csv = write(tmp_path, "at,in,out\n2024-01-01 00:00:00,5,1\n2024-01-01 00:00:00.5,6,2\n", "a.csv")
    assert read(csv, columns=Columns("at", "in", "out", "iso")) == [(0, 5, 1), (500_000_000, 6, 2)]
    lines = write(tmp_path, '{"at": 3, "in": 5, "out": 1, "x": []}\n{"at": "4", "in": 6, "out": 2}\n', "a.jsonl")
    assert read(lines, columns=Columns("at", "in", "out", "us")) == [(0, 5, 1), (1_000, 6, 2)]
    with pytest.raises(TraceError, match="say which `columns` hold the arrival"):
        read(csv, format="columns")
    with pytest.raises(TraceError, match="line 1, when: this column is missing"):
        read(csv, columns=Columns("when", "in", "out"))
    with pytest.raises(ValueError, match="unit must be one of s, ms, us, ns, iso, got 'h'"):
        Columns("at", "in", "out", "h")
    with pytest.raises(ValueError, match="three different names"):
        Columns("at", "in", "in")
    with pytest.raises(ValueError, match="columns are for the format columns, and the format is azure"):
        Trace(csv, "azure", columns=Columns("at", "in", "out"))


def test_parquet(tmp_path: Path) -> None:
    """Times as floats of a unit, or as timestamps; lengths that a table with gaps holds as floats."""
    path = tmp_path / "trace.parquet"
    table = {"t": [1.5, 2.0, 2.0, 7.0], "p": [10.0, 20.0, None, 40.5], "o": [1, 2, 3, 4]}
    pq.write_table(pa.table(table), path)
    assert detect_format(path) == "columns"
    columns = Columns("t", "p", "o")
    with pytest.raises(TraceError, match=r"line 3, p: must be a whole number of tokens.*\(got nothing\)"):
        read(path, columns=columns)
    trace = Trace(path, columns=columns, skip_bad_rows=True)
    assert [(s.arrival_ns, s.num_prompt_tokens) for s in trace.arrivals()] == [(0, 10), (500_000_000, 20)]
    assert sum(trace.left_out.values()) == 2
    with pytest.raises(TraceError, match=r"say which `columns`.*got t, p, o"):
        read(path)
    stamps = pa.array([1_700_000_000_000_001, 1_700_000_000_000_003], pa.timestamp("us", tz="UTC"))
    pq.write_table(pa.table({"arrival_s": stamps, "prompt_tokens": [1, 2], "output_tokens": [3, 4]}), path)
    assert read(path) == [(0, 1, 3), (2_000, 2, 4)]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut short"):
        read(path)


def test_names_of_tokens_become_names_of_blocks(tmp_path: Path) -> None:
    """Prompts equal up to the end of a block have a block in common; blocks of 4."""
    rows = [
        {"input_toks": 6, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1, 2, 3, 4, 5, 6]},
        {"input_toks": 6, "output_toks": 1, "arrival_time_ns": 1, "input_tok_ids": [1, 2, 3, 4, 9, 6]},
        {"input_toks": 6, "output_toks": 1, "arrival_time_ns": 2, "input_tok_ids": [0, 2, 3, 4, 5, 6]},
    ]
    first, second, third = Trace(write(tmp_path, json_lines(*rows)), block_tokens=4).arrivals()
    assert [count for _, _, count in first.prompt] == [4, 2]
    assert first.prompt[0] == second.prompt[0]
    assert len({*first.prompt, *second.prompt, *third.prompt}) == 5
    path = write(tmp_path, json_lines({**rows[0], "input_toks": 7}))
    with pytest.raises(TraceError, match=r"line 1, input_tok_ids: .* as input_toks, 7 \(got 6 ids\)"):
        read(path)


def test_mooncake_in_other_blocks(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3]}
    path = write(tmp_path, json_lines(row))
    with pytest.raises(TraceError, match=r"block_tokens 16 would fit, but an input_length of 33 in blocks of 512"):
        read(path)
    (spec,) = Trace(path, block_tokens=16).arrivals()
    assert spec.prompt == ((trace_stream(1), 0, 16), (trace_stream(2), 0, 16), (trace_stream(3), 0, 1))


def test_burstgpt_sessions_are_conversations(tmp_path: Path) -> None:
    """100 + 20 tokens, then 150 that begin with them; then 50, which cannot, so the session begins anew."""
    rows = (
        "0.0,a,1,m,100,20,120,c\n1.0,b,1,m,10,5,15,c\n2.0,a,1,m,150,7,157,c\n3.0,a,1,m,50,8,58,c\n4.0,a,1,m,60,1,61,c\n"
    )
    first, other, second, third, fourth = Trace(write(tmp_path, BURST_3 + rows)).arrivals()
    assert first == RequestSpec(0, 0, ((prompt_stream(0), 0, 100),), 100, 20, conversation=0, turn=0)
    assert (other.conversation, other.turn) == (1, 0)
    history = ((prompt_stream(0), 0, 100), (output_stream(0), 0, 20))
    assert second.prompt == (*history, (prompt_stream(2), 0, 30))
    assert (second.conversation, second.turn, second.arrival_ns) == (0, 1, 2_000_000_000)
    assert third.prompt == ((prompt_stream(3), 0, 50),)
    assert fourth.prompt == ((prompt_stream(3), 0, 50), (output_stream(3), 0, 8), (prompt_stream(4), 0, 2))
    assert (fourth.conversation, fourth.turn) == (0, 3)


# --- ShareGPT -----------------------------------------------------------------------------------------------------


def said(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


TALKS = [
    said(("human", "a" * 40), ("gpt", "b" * 20), ("human", "c" * 8), ("gpt", "d" * 5), ("human", "unanswered")),
    said(("gpt", "hello")),
    said(("system", "s" * 4), ("human", "é" * 2), ("gpt", "ok")),
]


def test_sharegpt_by_hand(tmp_path: Path) -> None:
    """A token for four bytes: 10 and 5, then 2 and 2 (5 bytes); 1 + 1 ("é" has two bytes) and 1; one without a turn."""
    for text in (json.dumps(TALKS, indent=1), json.dumps(TALKS, ensure_ascii=False), json_lines(*TALKS)):
        path = write(tmp_path, text)
        assert detect_format(path) == "sharegpt"
        talks = ShareGPT(path)
        assert (talks.num_sessions, talks.num_requests) == (2, 3)
        assert talks.left_out == {"conversations without an answered turn": 1}
        assert list(talks.lengths()) == [(10, 5), (17, 2), (2, 1)]
        first, second = (opening.at(7) for opening in talks.openings())
        assert (second.index, second.conversation) == (2, 1)
        following = talks.follow(first, 1_000)
        assert following == RequestSpec(
            1, 1_000, ((prompt_stream(0), 0, 10), (output_stream(0), 0, 5), (prompt_stream(1), 0, 2)), 17, 2,
            conversation=0, turn=1,
        )  # fmt: skip
        assert talks.follow(following, 2_000) is None
        assert talks.follow(second, 2_000) is None
    assert ShareGPT(path, max_conversations=1).num_sessions == 1
    assert ShareGPT(path, max_context_tokens=18).num_requests == 2  # 19 would be needed for the second turn
    with pytest.raises(TraceError, match="no conversation that can be used"):
        ShareGPT(path, max_context_tokens=2)
    with pytest.raises(ValueError, match="has no arrival times"):
        Trace(path)


BAD_TALKS: dict[str, tuple[str, str]] = {
    "cut": (json.dumps(TALKS)[:100], "line 1: the file ends in the middle"),
    "cut on a later line": (json.dumps(TALKS, indent=1)[:-30], "the file ends in the middle"),
    "not JSON": ("[{] and so on, for longer", "line 1: not JSON"),
    "nobody": (json.dumps([said(("robot", "x"))]), "line 1, from: must be one of human, user"),
    "no text": ('[{"conversations": [{"from": "gpt", "value": NaN}]}]', r"line 1, value: must be text \(got nan\)"),
    "no list": ("[\n\n7]", "line 3"),
    "empty": ("", "is empty"),
}


@pytest.mark.parametrize("case", BAD_TALKS)
def test_damaged_sharegpt(tmp_path: Path, case: str) -> None:
    content, message = BAD_TALKS[case]
    path = write(tmp_path, content)
    with pytest.raises(TraceError, match=message) as caught:
        ShareGPT(path)
    assert "\n" not in str(caught.value)
    good = json.dumps(TALKS[0])
    if case in ("nobody", "no text"):
        talks = ShareGPT(write(tmp_path, f"[{good},{content[1:]}"), skip_bad_rows=True)
        assert talks.num_sessions == 1
        assert sum(talks.left_out.values()) == 1
    if case == "cut":
        assert ShareGPT(write(tmp_path, f"[{good},{good[:50]}"), skip_bad_rows=True).left_out == {"cut short": 1}


def test_token_counts() -> None:
    assert [estimated_tokens(text) for text in ("", "a", "abcd", "abcde", "\u6f22\u5b57", "\ud800")] == [
        0,
        1,
        1,
        2,
        2,
        1,
    ]
    assert token_counter(None) is estimated_tokens
    with pytest.raises(ValueError, match="tokenizer '/nowhere/at/all'"):
        token_counter("/nowhere/at/all")


# --- damaged files ------------------------------------------------------------------------------------------------

Damage = Callable[[str, list[str]], list[str] | None]
"""From the format and the lines, ends included, to other lines; None where the damage does not apply."""

CSV = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "columns": ("arrival_ms", "prompt_tokens", "output_tokens"),
}
LINES = {
    "mooncake": ("timestamp", "input_length", "output_length"),
    "llmservingsim": ("arrival_time_ns", "input_toks", "output_toks"),
}


def with_value(format: str, lines: list[str], at: int, column: int, value: str) -> list[str]:
    """The same lines with another value in column 0 (time), 1 (prompt) or 2 (output) of line `at`, from 0."""
    changed = list(lines)
    if format in CSV:
        names = [name.strip() for name in lines[0].split(",")]
        fields = lines[at].rstrip("\r\n").split(",")
        fields[names.index(CSV[format][column])] = value
        changed[at] = ",".join(fields) + "\n"
    else:
        row = {**json.loads(lines[at]), LINES[format][column]: json.loads(value)}
        changed[at] = json.dumps(row) + "\n"
    return changed


def damaged(format: str, lines: list[str], kind: str) -> tuple[bytes, int] | None:
    """The damaged file and the line, from 1, where the error must lie; None where there is no such damage."""
    at = len(lines) // 2
    while at + 1 < len(lines) and format == "burstgpt" and ",0," in lines[at]:  # failed rows are passed over
        at += 1
    is_csv = format in CSV
    where = at + 1
    match kind:
        case "cut in the middle":
            cut = lines[at].index(",") + 1 if is_csv else len(lines[at]) // 2
            lines = [*lines[:at], lines[at][:cut]]
        case "wrong column":
            name = (CSV if is_csv else LINES)[format][1]
            lines = [line.replace(name, name.replace("t", "d")) for line in lines]
            where = 1
        case "NaN":
            lines = with_value(format, lines, at, 2, "NaN")
        case "negative":
            lines = with_value(format, lines, at, 1, "-3")
        case "NaN time" if format != "azure":
            lines = with_value(format, lines, at, 0, "NaN")
        case "negative time" if format != "azure":
            lines = with_value(format, lines, at, 0, "-1")
        case "other separators" if is_csv:
            lines = [line.replace(",", ";") for line in lines]
            where = 1
        case "mixed time zones" if format == "azure":
            zoned = "+00:00" in lines[1]
            time = lines[at].split(",")[0]
            lines = with_value(format, lines, at, 0, time.removesuffix("+00:00") if zoned else time + "+01:00")
        case "unsorted":
            zone = "+00:00" if "+00:00" in lines[1] else ""
            known = {"azure": f"2099-01-01 00:00:00{zone}", "llmservingsim": "1000000000000000"}
            late = known.get(format, "9000000000")
            lines = with_value(format, lines, 1 if is_csv else 0, 0, late)
            where = 3 if is_csv else 2
        case _:
            return None
    return "".join(lines).encode(), where


KINDS = [
    "cut in the middle", "wrong column", "NaN", "negative", "NaN time", "negative time", "other separators",
    "mixed time zones", "unsorted",
]  # fmt: skip


def check_damage(folder: Path, format: str, text: str, kind: str) -> None:
    done = damaged(format, text.splitlines(keepends=True), kind)
    if done is None:
        return
    content, line = done
    path = write(folder, content, "damaged")
    for asked in (format, "auto"):
        with pytest.raises(TraceError) as caught:
            Trace(path, asked).check()
        assert caught.value.line == line, str(caught.value)
        assert str(caught.value).startswith(f"{path}, line {line}")
    if kind in ("wrong column", "other separators") and format in CSV:
        with pytest.raises(TraceError):  # nothing of the file can be used
            Trace(path, format, skip_bad_rows=True).check()
        return
    whole = Trace(write(folder, text, "whole"), format)
    count = whole.check()
    trace = Trace(path, format, skip_bad_rows=True)
    if kind == "wrong column":
        with pytest.raises(TraceError, match=r"no requests that can be used; left out: .*: this column is missing"):
            trace.check()
        return
    kept = trace.check()
    bad = sum(trace.left_out.values()) - trace.left_out.get("failed requests", 0)
    if kind == "unsorted":  # the first row stands for the latest time of all
        assert (kept, bad) == (1, count - 1)
        assert "out of order" in next(iter(trace.left_out))
    elif kind == "cut in the middle":
        assert bad == 1
        assert 0 < kept < count
    else:
        assert (kept, bad) == (count - 1, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", [*CSV, *LINES])
def test_damaged_samples(tmp_path: Path, format: str, kind: str) -> None:
    check_damage(tmp_path, format, SAMPLES[format].text, kind)


PUBLISHED = {
    "SYNTHETIC_azure2024_format_3rows.csv": ("azure", 3, 0),
    "SYNTHETIC_burstgpt_format_1000.csv": ("burstgpt", 974, 26),
    "SYNTHETIC_sharegpt_format_2.json": ("sharegpt", 2, 0),
    "azure2023_code_1000.csv": ("azure", 1000, 0),
    "azure2023_conv.csv": ("azure", 19_366, 0),
    "burstgpt1_quoted_3rows.csv": ("burstgpt", 3, 0),
    "burstgpt3_quoted_4rows.csv": ("burstgpt", 4, 0),
    "llmservingsim_mixed_me2_noids.jsonl": ("llmservingsim", 608, 0),
    "llmservingsim_sharegpt_l31_8b_300_noids.jsonl": ("llmservingsim", 300, 0),
    "mooncake_fast25_conversation_1000.jsonl": ("mooncake", 1000, 0),
    "mooncake_fast25_synthetic_1000.jsonl": ("mooncake", 1000, 0),
    "vidur_splitwise_code_1000.csv": ("vidur", 1000, 0),
    "vidur_splitwise_conv_1000.csv": ("vidur", 1000, 0),
}
"""Format, requests and failed rows; the numbers of rows as the folder's README and line counts have them."""


def test_published_files_read_as_they_are(shared_data: Path) -> None:
    folder = shared_data / "traces"
    assert {file.name for file in folder.iterdir()} == set(PUBLISHED)
    for name, (format, count, failed) in PUBLISHED.items():
        assert detect_format(folder / name) == format
        if format == "sharegpt":
            assert ShareGPT(folder / name).num_requests == count
            continue
        trace = Trace(folder / name)
        assert trace.check() == count
        assert sum(trace.left_out.values()) == failed
    assert Trace(shared_data / "vllm_formats" / "vllm_bench_serve_detailed_synthetic.json").check() == 2


@pytest.mark.parametrize("kind", [*KINDS, "byte-order mark", "CRLF"])
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "sharegpt_format" not in name])
def test_damaged_copies_of_published_files(shared_data: Path, tmp_path: Path, name: str, kind: str) -> None:
    original = shared_data / "traces" / name
    format = PUBLISHED[name][0]
    text = original.read_text(encoding="utf-8")
    if len(text) > 4_000_000 or text.count("\n") > 2000:
        text = "".join(text.splitlines(keepends=True)[:1001])  # a part shows as much, sooner
    if kind == "byte-order mark":
        path = write(tmp_path, b"\xef\xbb\xbf" + text.encode())
        assert read(path) == read(write(tmp_path, text, "whole"))
    elif kind == "CRLF":
        path = write(tmp_path, text.replace("\n", "\r\n"))
        assert read(path) == read(write(tmp_path, text, "whole"))
    else:
        check_damage(tmp_path, format, text, kind)


def test_damaged_copies_of_the_sharegpt_file(shared_data: Path, tmp_path: Path) -> None:
    text = (shared_data / "traces" / "SYNTHETIC_sharegpt_format_2.json").read_text(encoding="utf-8")
    whole = list(ShareGPT(write(tmp_path, text)).lengths())
    assert list(ShareGPT(write(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())).lengths()) == whole
    for broken, line in (
        (text[: text.index("Name a prime")], 20),
        (text.replace('"human"', '"hman"', 1), 2),
        (text.replace('"from"', '"form"', 1), 2),
        (text.replace('"Eleven."', "NaN"), 15),
        (text.replace('"Eleven."', "-11"), 15),
        (text.replace(",", ";"), 3),
    ):
        with pytest.raises(TraceError) as caught:
            ShareGPT(write(tmp_path, broken))
        assert caught.value.line == line, str(caught.value)


# --- reports --------------------------------------------------------------------------------------------------------


def test_damaged_reports(tmp_path: Path) -> None:
    bench, report = json.loads(SAMPLES["vllm_bench"].text), json.loads(SAMPLES["guidellm"].text)
    no_details = {"num_prompts": 4, "total_input_tokens": 7, "request_throughput": 1.0}
    report_without = {"benchmarks": [{"metrics": {}}]}
    wrong: list[tuple[str, str, str]] = [
        ("vllm_bench", json.dumps({**bench, "output_lens": [6, 5, 0, -9]}), r"line 1, output_lens\[3\].*got -9"),
        ("vllm_bench", json.dumps({**bench, "input_lens": [None, 2, 3, 4]}), r"input_lens\[0\].*got nothing"),
        ("vllm_bench", json.dumps({**bench, "start_times": [1, float("nan"), 3, 4]}), r"start_times\[1\].*got nan"),
        ("vllm_bench", json.dumps({**bench, "start_times": [1]}), "differ in length: input_lens 4, .*start_times 1"),
        ("vllm_bench", json.dumps({**bench, "start_times": None}), "start_times: must be a list"),
        ("vllm_bench", SAMPLES["vllm_bench"].text[:-40], "line 1: the file ends in the middle"),
        ("vllm_bench", SAMPLES["vllm_bench"].text * 2, "holds more than one result"),
        ("vllm_bench", json.dumps({"input_lens": []}), "output_lens: this list is missing; save .* --save-detailed"),
        ("auto", json.dumps(no_details), "without its requests; save it with --save-detailed"),
        ("guidellm", SAMPLES["guidellm"].text.replace('"prompt_tokens": 12', '"prompt_tokens": -12'), "got -12"),
        ("guidellm", SAMPLES["guidellm"].text.replace('"start_time": 40.0, ', ""), "start_time.*got nothing"),
        ("guidellm", json.dumps(report_without), "holds no `requests`"),
        ("guidellm", SAMPLES["guidellm"].text[:-60], "line 1: the file ends in the middle"),
    ]
    for format, text, message in wrong:
        path = write(tmp_path, text)
        with pytest.raises(TraceError, match=message):
            Trace(path, format).check()
    assert report["benchmarks"]
    skipping = Trace(write(tmp_path, wrong[0][1]), "vllm_bench", skip_bad_rows=True)
    assert skipping.check() == 2
    assert skipping.left_out == {
        "failed requests": 1,
        "output_lens: must be a whole number of tokens, 0 to 2147483647": 1,
    }


def test_guidellm_conversations(tmp_path: Path) -> None:
    """Two turns of a conversation, the second at least as long as the first and its answer."""
    requests = [
        {"request_start_time": t, "prompt_tokens": p, "output_tokens": 5, "info": {"conversation_id": "c"}}
        for t, p in ((2.0, 30), (1.0, 20))
    ]
    first, second = Trace(
        write(tmp_path, json.dumps({"benchmarks": [{"requests": {"successful": requests}}]}))
    ).arrivals()
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (20, 30)
    assert second.prompt == ((prompt_stream(0), 0, 20), (output_stream(0), 0, 5), (prompt_stream(1), 0, 5))


# --- options ----------------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_by_reason(tmp_path: Path) -> None:
    rows = ["1,5,5", "0,5,5", "2,x,5", "3,5,-1", "4,6", "caf\xe9,5,5", "5,0,1", "6,7,8"]
    content = ("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows)).encode("latin-1") + b"\n\0\n"
    trace = Trace(write(tmp_path, content), skip_bad_rows=True)
    assert [spec.num_prompt_tokens for spec in trace.arrivals()] == [5, 7]
    assert trace.left_out == {
        "num_prefill_tokens: must be a whole number of tokens, 1 to 2147483647": 2,
        "arrived_at: out of order": 1,
        "num_decode_tokens: must be a whole number of tokens, 1 to 2147483647": 1,
        "line is cut short": 1,
        "not UTF-8 text": 1,
        "not a text file: it holds a NUL byte": 1,
    }
    assert trace.check() == 2  # counts anew
    assert sum(trace.left_out.values()) == 7


def test_a_gzip_cut_in_the_middle(tmp_path: Path) -> None:
    rows = "".join(f"{i},{1 + i * 7919 % 1000},{1 + i * 104729 % 500}\n" for i in range(20_000))
    content = gzip.compress(b"arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows.encode())
    path = write(tmp_path, content[: len(content) // 2], "trace.csv.gz")
    with pytest.raises(TraceError, match=r"broken gzip after line \d+"):
        Trace(path).check()
    trace = Trace(path, skip_bad_rows=True)
    assert 5_000 < trace.check() < 15_000
    assert trace.left_out["broken gzip"] == 1


def test_progress_is_told(tmp_path: Path) -> None:
    rows = "".join(f"{i},5,5\n" for i in range(140_000))
    path = write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    told: list[tuple[int, float]] = []
    Trace(path, progress=lambda count, share: told.append((count, share))).check()
    assert [count for count, _ in told] == [65_536, 131_072]
    assert told[0][1] == pytest.approx(0.46, abs=0.1)
    assert told[0][1] < told[1][1] <= 1.0
