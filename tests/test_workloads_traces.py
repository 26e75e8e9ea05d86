"""The trace readers: published files by hand, and everything that may be wrong with one."""

import gzip
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.spec import RequestSpec
from workloads.traces import Trace, TraceError, check_trace, detect_format, read_azure, read_mooncake

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW_1 = "2023-11-16 18:15:46.6805900,374,44\n"
ROW_2 = "2023-11-16 18:15:50.9951690,396,109\n"


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mooncake_line(**changes: object) -> str:
    row: dict[str, object] = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}
    return json.dumps({**row, **changes}) + "\n"


# --- what the files say -------------------------------------------------------------------------------------------


def test_azure_2023_by_hand(tmp_path: Path) -> None:
    """50.9951690 - 46.6805900 = 4.3145790 s."""
    trace = read_azure(write(tmp_path, HEADER + ROW_1 + ROW_2))
    assert list(trace.arrivals()) == [
        RequestSpec(0, 0, ((1, 0, 374),), 374, 44),
        RequestSpec(1, 4_314_579_000, ((5, 0, 396),), 396, 109),
    ]
    assert trace.after(next(trace.arrivals()), 5) == ()
    assert trace.num_requests is None
    assert trace.check() == 2
    assert trace.num_requests == 2


def test_azure_2024_by_hand(tmp_path: Path) -> None:
    """A zone, six decimals or none, over midnight; 7 decimals and more are kept whole."""
    rows = "2024-05-10 23:59:59.009930+00:00,812,36\n2024-05-11 00:00:01+00:00,77,210\n"
    assert [spec.arrival_ns for spec in read_azure(write(tmp_path, HEADER + rows)).arrivals()] == [0, 1_990_070_000]
    rows = "2024-05-10T00:00:00.000000001Z,1,1\n2024-05-10T00:00:00.0000001Z,1,1\n"
    assert [spec.arrival_ns for spec in read_azure(write(tmp_path, HEADER + rows)).arrivals()] == [0, 99]


def test_mooncake_by_hand(tmp_path: Path) -> None:
    """Blocks of 512: 1,000 tokens are one whole block and 488 of another; equal ids are equal streams."""
    text = mooncake_line() + mooncake_line(timestamp=27, input_length=1024, hash_ids=[4, 10], output_length=3)
    assert list(read_mooncake(write(tmp_path, text)).arrivals()) == [
        RequestSpec(0, 0, ((19, 0, 512), (39, 0, 488)), 1000, 7),
        RequestSpec(1, 27_000_000, ((19, 0, 512), (43, 0, 512)), 1024, 3),
    ]
    text = mooncake_line(timestamp=1.5, input_length=33, hash_ids=[0, 1, 2])
    (spec,) = read_mooncake(write(tmp_path, text), block_tokens=16).arrivals()
    assert spec.prompt == ((3, 0, 16), (7, 0, 16), (11, 0, 1))


def test_options(tmp_path: Path) -> None:
    """Eight times faster: 4,314,579,000 / 8 = 539,322,375 ns."""
    path = write(tmp_path, HEADER + ROW_1 + ROW_2)
    assert [spec.arrival_ns for spec in read_azure(path, time_scale=8).arrivals()] == [0, 539_322_375]
    assert [spec.arrival_ns for spec in read_azure(path, time_scale=0.5).arrivals()] == [0, 8_629_158_000]
    first = read_azure(path, max_requests=1)
    assert [spec.index for spec in first.arrivals()] == [0]
    assert first.check() == 1
    assert read_azure(path, max_requests=5).check() == 2


def test_what_lies_beyond_max_requests_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + ROW_1 + "rubbish\n")
    assert read_azure(path, max_requests=1).check() == 1
    with pytest.raises(TraceError):
        check_trace(path)


SPELLINGS = {
    "byte-order mark": b"\xef\xbb\xbf" + (HEADER + ROW_1 + ROW_2).encode(),
    "CRLF": (HEADER + ROW_1 + ROW_2).replace("\n", "\r\n").encode(),
    "no last line end": (HEADER + ROW_1 + ROW_2).rstrip().encode(),
    "blank lines": ("\n" + HEADER + "\n" + ROW_1 + ROW_2 + "\n \n").encode(),
    "quotes and spaces": b'"TIMESTAMP", ContextTokens,GeneratedTokens\n"2023-11-16 18:15:46.6805900",374 ,"44"\n'
    + ROW_2.encode(),
    "another order and another column": (
        b"GeneratedTokens,Model,TIMESTAMP,ContextTokens\n44,a,2023-11-16 18:15:46.68059,374\n"
        b"109,,2023-11-16 18:15:50.995169,396\n"
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("zipped", [False, True])
def test_other_spellings_read_the_same(tmp_path: Path, spelling: str, zipped: bool) -> None:
    content = SPELLINGS[spelling]
    path = write(tmp_path, gzip.compress(content) if zipped else content, "t.csv.gz" if zipped else "t.csv")
    read = [(spec.arrival_ns, spec.num_prompt_tokens, spec.max_tokens) for spec in Trace(path).arrivals()]
    assert read == [(0, 374, 44), (4_314_579_000, 396, 109)]


def test_equal_times_are_in_order(tmp_path: Path) -> None:
    assert check_trace(write(tmp_path, HEADER + ROW_1 + ROW_1)) == 2
    assert check_trace(write(tmp_path, mooncake_line() + mooncake_line())) == 2


def test_detecting_the_format(tmp_path: Path) -> None:
    assert detect_format(write(tmp_path, HEADER)) == "azure"
    assert detect_format(write(tmp_path, "\n" + mooncake_line())) == "mooncake"
    with pytest.raises(TraceError, match="is empty"):
        detect_format(write(tmp_path, "\n"))
    # A misspelt column is for the reader to complain about.
    assert detect_format(write(tmp_path, "TIMESTAMP,ContextToken,Generated\n")) == "azure"
    for other in ("begin,tokens_in,tokens_out\n", '{"tokens_in": 1, "begin": 0}\n'):
        with pytest.raises(TraceError, match="line 1: cannot tell the format; azure is CSV with TIMESTAMP") as caught:
            detect_format(write(tmp_path, other))
        assert caught.value.line == 1


# --- what may be wrong --------------------------------------------------------------------------------------------

AZURE_WRONG: dict[str, tuple[str | bytes, int | None, str | None, str]] = {
    "empty": ("", None, None, "is empty"),
    "blank": ("\n\n", None, None, "is empty"),
    "header only": (HEADER, None, None, "no requests"),
    "NUL": (HEADER.encode() + b"\0\1\2\n", 2, None, "NUL byte"),
    "UTF-16": ((HEADER + ROW_1).encode("utf-16"), 1, None, "NUL byte"),
    "Latin-1": (HEADER.encode() + b"2023-11-16 18:15:46,caf\xe9,1\n", 2, None, "not UTF-8 text (got byte 0xe9)"),
    "missing column": (
        "TIMESTAMP,ContextToken,GeneratedTokens\n" + ROW_1,
        1,
        "ContextTokens",
        "missing; did you mean 'ContextToken'?",
    ),
    "no such column": ("a,b,c\n" + ROW_1, 1, "TIMESTAMP", "missing; there are a, b, c"),
    "column twice": ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", 1, "ContextTokens", "twice"),
    "truncated": (HEADER + ROW_1 + "2023-11-16 18:15:50.99,39", 3, None, "line is cut short: 2 of 3 columns"),
    "too long": (HEADER + "2023-11-16 18:15:46,1,2,3\n", 2, None, "line is too long: 4 of 3 columns"),
    "open quote": (HEADER + '"2023-11-16 18:15:46,1,2\n', 2, None, "not a line of CSV"),
    "malformed": (HEADER + "2023-11-16 18:15:46,12x,5\n", 2, "ContextTokens", "(got 12x)"),
    "fraction": (HEADER + "2023-11-16 18:15:46,12.5,5\n", 2, "ContextTokens", "whole number of tokens"),
    "nothing": (HEADER + "2023-11-16 18:15:46,,5\n", 2, "ContextTokens", "(got nothing)"),
    "NaN": (HEADER + "2023-11-16 18:15:46,5,NaN\n", 2, "GeneratedTokens", "(got NaN)"),
    "negative": (HEADER + "2023-11-16 18:15:46,5,-3\n", 2, "GeneratedTokens", "1 to 2147483647 (got -3)"),
    "zero": (HEADER + ROW_1 + "2023-11-16 18:15:47,5,0\n", 3, "GeneratedTokens", "(got 0)"),
    "huge": (HEADER + f"2023-11-16 18:15:46,{2**31},1\n", 2, "ContextTokens", "(got 2147483648)"),
    "other digits": (HEADER + "2023-11-16 18:15:46,\u0663,1\n", 2, "ContextTokens", "whole number"),
    "time": (HEADER + "16/11/2023 18:15,5,5\n", 2, "TIMESTAMP", "(got 16/11/2023 18:15)"),
    "no such day": (HEADER + "2023-02-30 18:15:46,5,5\n", 2, "TIMESTAMP", "not a time"),
    "unsorted": (
        HEADER + ROW_2 + ROW_1,
        3,
        "TIMESTAMP",
        "earlier than 2023-11-16 18:15:50.9951690 on line 2; a trace must be in order of time "
        "(got 2023-11-16 18:15:46.6805900)",
    ),
    "mixed zones": (
        HEADER + "2024-05-10 00:00:00+00:00,5,5\n2024-05-10 00:00:01,5,5\n",
        3,
        "TIMESTAMP",
        "mixed time zones: no zone here, +00:00 on line 2",
    ),
}

MOONCAKE_WRONG: dict[str, tuple[str | bytes, int | None, str | None, str]] = {
    "empty": ("", None, None, "is empty"),
    "truncated": (mooncake_line() + mooncake_line()[:40], 2, None, "cut short"),
    "not an object": (mooncake_line() + "[1, 2]\n", 2, None, "must be a JSON object"),
    "missing key": (mooncake_line().replace("hash_ids", "hash_id"), 1, "hash_ids", "did you mean 'hash_id'?"),
    "NUL": (b'{"timestamp": 0\0}\n', 1, None, "NUL byte"),
    "NaN time": (mooncake_line(timestamp=float("nan")), 1, "timestamp", "(got nan)"),
    "negative time": (mooncake_line(timestamp=-1), 1, "timestamp", "(got -1)"),
    "endless time": (mooncake_line(timestamp=1e300), 1, "timestamp", "(got 1e+300)"),
    "text time": (mooncake_line(timestamp="0"), 1, "timestamp", "must be a number of milliseconds"),
    "yes or no time": (mooncake_line(timestamp=True), 1, "timestamp", "(got True)"),
    "zero length": (mooncake_line(input_length=0, hash_ids=[]), 1, "input_length", "(got 0)"),
    "negative length": (mooncake_line(output_length=-4), 1, "output_length", "(got -4)"),
    "NaN length": (mooncake_line(output_length=float("nan")), 1, "output_length", "(got nan)"),
    "fraction": (mooncake_line(output_length=4.0), 1, "output_length", "(got 4.0)"),
    "too few ids": (
        mooncake_line() + mooncake_line(input_length=1025),
        2,
        "hash_ids",
        "an input_length of 1025 in blocks of 512 tokens takes 3 ids (got 2 ids)",
    ),
    "too many ids": (mooncake_line(input_length=512), 1, "hash_ids", "takes 1 ids (got 2 ids)"),
    "not a list": (mooncake_line(hash_ids=3), 1, "hash_ids", "must be a list"),
    "negative id": (mooncake_line(hash_ids=[1, -2]), 1, "hash_ids", "(got -2)"),
    "line ends in a value": (mooncake_line(hash_ids=[1, "a\nb"]), 1, "hash_ids", r"(got a\nb)"),
    "text id": (mooncake_line(hash_ids=[1, "a"]), 1, "hash_ids", "(got a)"),
    "unsorted": (
        mooncake_line(timestamp=5) + mooncake_line(timestamp=4),
        2,
        "timestamp",
        "earlier than 5 ms on line 1; a trace must be in order of time (got 4 ms)",
    ),
}


@pytest.mark.parametrize(
    ("format", "case"), [("azure", case) for case in AZURE_WRONG] + [("mooncake", case) for case in MOONCAKE_WRONG]
)
def test_a_bad_file_is_refused(tmp_path: Path, format: str, case: str) -> None:
    content, line, column, message = (AZURE_WRONG if format == "azure" else MOONCAKE_WRONG)[case]
    path = write(tmp_path, content, "bad trace")
    with pytest.raises(TraceError) as caught:
        check_trace(path, format)
    error = caught.value
    assert (error.path, error.line, error.column) == (path, line, column)
    where = str(path) + (f", line {line}" if line else "") + (f", {column}" if column else "") + ": "
    assert str(error).startswith(where)
    assert message in str(error)
    assert "\n" not in str(error)
    assert isinstance(error, ValueError)
    with pytest.raises(TraceError) as again:
        list(Trace(path, format).arrivals())
    assert str(again.value) == str(error)


def test_a_missing_file_a_folder_and_a_broken_gzip(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.csv", "no such file"),
        (tmp_path, "is a folder, not a file"),
        (write(tmp_path, "not gzip", "a.gz"), "broken gzip"),
        (write(tmp_path, gzip.compress((HEADER + ROW_1 * 50).encode())[:-12], "b.gz"), "broken gzip"),
        (write(tmp_path, HEADER, "file") / "below", "cannot be read: Not a directory"),
    ):
        for format in ("auto", "azure"):
            with pytest.raises(TraceError) as caught:
                check_trace(path, format)
            assert str(caught.value).startswith(f"{path}: ")
            assert message in str(caught.value)


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + ROW_1)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time_scale must be a number above 0, got"):
            read_azure(path, time_scale=scale)
    with pytest.raises(ValueError, match="max_requests must be 1 or more, got 0"):
        read_azure(path, max_requests=0)
    with pytest.raises(ValueError, match="block_tokens must be 1 or more, got 0"):
        read_mooncake(path, block_tokens=0)
    with pytest.raises(ValueError, match=r"format must be one of auto, azure, .*, columns, got 'burst'"):
        Trace(path, "burst")


@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)), azure=st.booleans())
def test_rubbish_gives_a_trace_error_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, azure: bool
) -> None:
    path = write(tmp_path_factory.getbasetemp(), (HEADER.encode() if azure else b"") + content)
    for format in ("auto", "azure", "mooncake"):
        with pytest.raises(TraceError):
            check_trace(path, format)


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=20),
    st.sampled_from([1.0, 8.0, 3.0, 0.1]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], time_scale: float
) -> None:
    rows.sort()
    lines = [
        mooncake_line(timestamp=ms, input_length=prompt, output_length=output, hash_ids=list(range(-(-prompt // 512))))
        for ms, prompt, output in rows
    ]
    path = write(tmp_path_factory.getbasetemp(), "".join(lines))
    specs = list(Trace(path, time_scale=time_scale).arrivals())
    assert [(spec.num_prompt_tokens, spec.max_tokens) for spec in specs] == [row[1:] for row in rows]
    for spec, (ms, _, _) in zip(specs, rows, strict=True):
        assert abs(spec.arrival_ns * time_scale - (ms - rows[0][0]) * 1e6) <= 0.5 * time_scale + 1e-2


# --- the published files ------------------------------------------------------------------------------------------


def test_the_azure_2023_conversation_trace(shared_data: Path) -> None:
    """19,366 requests (the dataset's page); the first rows were worked by hand above."""
    path = shared_data / "traces" / "azure2023_conv.csv"
    begin = time.process_time()
    assert check_trace(path) == 19_366
    assert time.process_time() - begin < 1.0  # takes 0.06 s; the rest is for a busy machine
    specs = list(read_azure(path, max_requests=2).arrivals())
    assert specs[1] == RequestSpec(1, 4_314_579_000, ((5, 0, 396),), 396, 109)


def test_every_published_trace_reads(shared_data: Path) -> None:
    rows = {
        "azure2023_code_1000.csv": ("azure", 1000),
        "SYNTHETIC_azure2024_format_3rows.csv": ("azure", 3),
        "mooncake_fast25_conversation_1000.jsonl": ("mooncake", 1000),
        "mooncake_fast25_synthetic_1000.jsonl": ("mooncake", 1000),
    }
    for name, (format, count) in rows.items():
        trace = Trace(shared_data / "traces" / name)
        assert trace.format == format
        assert trace.check() == count
        times = [spec.arrival_ns for spec in trace.arrivals()]
        assert times[0] == 0
        assert times == sorted(times)


def test_the_azure_2024_sample(shared_data: Path) -> None:
    """00.009930, 00.020011 and 01 seconds after midnight."""
    trace = Trace(shared_data / "traces" / "SYNTHETIC_azure2024_format_3rows.csv")
    assert [spec.arrival_ns for spec in trace.arrivals()] == [0, 10_081_000, 990_070_000]


def test_mooncake_prefixes(shared_data: Path) -> None:
    """The first three lines, read by eye: 6,758, 7,322 and 7,236 tokens at time 0; they share block 0 and no other."""
    trace = Trace(shared_data / "traces" / "mooncake_fast25_conversation_1000.jsonl", max_requests=3)
    first, second, third = trace.arrivals()
    assert [spec.arrival_ns for spec in (first, second, third)] == [0, 0, 0]
    assert [spec.num_prompt_tokens for spec in (first, second, third)] == [6758, 7322, 7236]
    assert [spec.max_tokens for spec in (first, second, third)] == [500, 490, 794]
    # 6,758 = 13 * 512 + 102, ids 0 to 13, and the stream of id n is 4 n + 3.
    assert first.prompt == (*((4 * n + 3, 0, 512) for n in range(13)), (55, 0, 102))
    assert second.prompt[:2] == ((3, 0, 512), (59, 0, 512))
    assert third.prompt[:2] == ((3, 0, 512), (115, 0, 512))
    for one, other in ((first, second), (first, third), (second, third)):
        assert {stream for stream, _, _ in one.prompt} & {stream for stream, _, _ in other.prompt} == {3}
