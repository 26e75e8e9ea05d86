"""`speckv workload`: look at a trace, fit a generator to it, and say which formats are read.

Knows: readers, summaries, fits, and how they are shown. Must not know: the engine. Every error is one message on
standard error; exit codes as those of the command: 0 done, 2 bad input, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from workloads.fit import Compared, StandIn
    from workloads.inspect import Summary
    from workloads.sharegpt import ShareGPT
    from workloads.trace_formats import Columns
    from workloads.traces import Progress, Trace

__all__ = ["app"]

_BAD_INPUT, _INTERRUPTED = 2, 130

app = typer.Typer(
    name="workload",
    help="Look at traces, and fit generators to them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FormatOption = Annotated[str, typer.Option("--format", metavar="NAME", help="See `speckv workload formats`.")]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="ARRIVAL,PROMPT,OUTPUT[,UNIT]",
        help="What the columns of your own file are called; the unit of the arrivals is s, ms, us, ns or iso.",
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and count them.")]
MostOption = Annotated[int | None, typer.Option("--max-requests", min=1, metavar="N", help="Only the first N.")]
BlockOption = Annotated[
    int | None,
    typer.Option("--block-tokens", min=1, metavar="N", help="Tokens a block of the trace stands for, else by format."),
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="For sharegpt; else four bytes are a token.")
]


@app.command("inspect")
def inspect_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, gzipped or not.")],
    format: FormatOption = "auto",
    columns: ColumnsOption = None,
    skip_bad_rows: SkipOption = False,
    max_requests: MostOption = None,
    block_tokens: BlockOption = None,
    tokenizer: TokenizerOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw it as well.")] = None,
) -> None:
    """Say what a trace is like: how many, how fast, in what bursts, how long, and what prompts share."""
    with _errors_told(), _progress() as progress:
        trace = _opened(file, format, columns, skip_bad_rows, max_requests, block_tokens, tokenizer, progress)
        summary = _summary(trace)
    if picture is not None:
        with _errors_told():
            _draw(summary, file.name, picture)
    if as_json:
        left_out = {"left_out": trace.left_out}
        print(json.dumps({"file": str(file), "format": _name(trace), **left_out, **summary.as_dict()}, indent=2))
    else:
        _show(file, trace, summary)


@app.command("fit")
def fit_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace, gzipped or not.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PART.yaml", help="Where the part of a scenario goes.")
    ] = None,
    format: FormatOption = "auto",
    columns: ColumnsOption = None,
    skip_bad_rows: SkipOption = False,
    max_requests: MostOption = None,
    block_tokens: BlockOption = None,
    tokenizer: TokenizerOption = None,
    arrivals: Annotated[str, typer.Option("--arrivals", help="auto, gamma or piecewise.")] = "auto",
    as_profile: Annotated[bool, typer.Option("--as-profile", help="Print it as workloads/profiles.py has it.")] = False,
) -> None:
    """Fit a generator that stands in for a trace, and hold it against the trace; it is printed, or written with -o."""
    from workloads.fit import compare, fit, fit_conversations
    from workloads.sharegpt import ShareGPT

    if arrivals not in ("auto", "gamma", "piecewise"):
        _fail(f"--arrivals {arrivals}: no such choice; allowed: auto, gamma, piecewise")
    chosen: Literal["auto", "gamma", "piecewise"] = arrivals  # type: ignore[assignment]
    with _errors_told(), _progress() as progress:
        trace = _opened(file, format, columns, skip_bad_rows, max_requests, block_tokens, tokenizer, progress)
        summary = _summary(trace)
        stand_in = fit_conversations(list(trace.turns())) if isinstance(trace, ShareGPT) else fit(summary, chosen)
        rows = compare(summary, stand_in)
    if as_profile:
        print(_as_profile(stand_in))
        return
    part = _part(file, stand_in, rows)
    if output is None:
        print(part, end="")
    else:
        with _errors_told():
            output.write_text(part, encoding="utf-8", newline="\n")
    _show_comparison(rows)


@app.command("formats")
def list_formats() -> None:
    """Say which formats are read."""
    for name, told in FORMATS_TOLD.items():
        print(f"{name:14} {told}")


FORMATS_TOLD: Final = {
    "azure": "CSV: TIMESTAMP, ContextTokens, GeneratedTokens (Azure 2023 and 2024)",
    "burstgpt": "CSV: Timestamp (s), Request tokens, Response tokens, perhaps Session ID (BurstGPT 1 to 3)",
    "mooncake": "JSON lines: timestamp (ms), input_length, output_length, hash_ids; --block-tokens if not 512",
    "sharegpt": "JSON: conversations of messages from human and gpt; no times, so a process starts them",
    "llmservingsim": "JSON lines: input_toks, output_toks, arrival_time_ns, perhaps input_tok_ids",
    "vidur": "CSV: arrived_at (s), num_prefill_tokens, num_decode_tokens",
    "vllm_bench": "JSON: a result of vllm bench serve --save-detailed, with input_lens, output_lens, start_times",
    "guidellm": "JSON: a report of guidellm, with benchmarks and their requests",
    "columns": "CSV, JSON lines or Parquet with columns of your own: --columns, or arrival_s (or _ms, _us, _ns), "
    "prompt_tokens, output_tokens",
}


# Opening


def _opened(
    file: Path,
    format: str,
    columns: str | None,
    skip_bad_rows: bool,
    max_requests: int | None,
    block_tokens: int | None,
    tokenizer: str | None,
    progress: Progress | None,
) -> Trace | ShareGPT:
    from workloads.sharegpt import ShareGPT
    from workloads.traces import Trace, detect_format

    named = None if columns is None else _columns(columns)
    if format == "auto" and named is None:
        format = detect_format(file)
    if format == "sharegpt":
        return ShareGPT(
            file,
            max_conversations=max_requests,
            tokenizer=tokenizer,
            skip_bad_rows=skip_bad_rows,
            progress=progress,
        )
    if tokenizer is not None:
        raise ValueError(f"--tokenizer has no meaning with the format {format}: its lengths are in tokens")
    return Trace(
        file,
        format,
        max_requests=max_requests,
        block_tokens=block_tokens,
        columns=named,
        skip_bad_rows=skip_bad_rows,
        progress=progress,
    )


def _columns(text: str) -> Columns:
    from workloads.trace_formats import Columns

    names = [name.strip() for name in text.split(",")]
    if len(names) not in (3, 4):
        raise ValueError(f"--columns {text}: give three names and perhaps a unit, ARRIVAL,PROMPT,OUTPUT[,UNIT]")
    return Columns(*names)


def _summary(trace: Trace | ShareGPT) -> Summary:
    from workloads.inspect import conversation_requests, inspect_requests
    from workloads.sharegpt import ShareGPT

    if isinstance(trace, ShareGPT):
        return inspect_requests(conversation_requests(trace), has_times=False)
    block_tokens = trace.block_tokens if trace.format in ("mooncake", "llmservingsim") else 16
    return inspect_requests(trace.arrivals(), block_tokens)


def _name(trace: Trace | ShareGPT) -> str:
    return getattr(trace, "format", "sharegpt")


# Showing


def _show(file: Path, trace: Trace | ShareGPT, summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    from workloads.inspect import QUANTILES

    console = Console(highlight=False)
    table = Table(title=f"{file.name}, {_name(trace)}", title_justify="left", show_header=False, box=None)
    table.add_row("requests", f"{summary.num_requests:,}")
    for reason, count in trace.left_out.items():
        table.add_row("left out", f"{count:,}: {reason}")
    if summary.has_times:
        table.add_row("from first to last", f"{summary.duration_s:,.6g} s")
        table.add_row("rate", f"{summary.rate_per_s:.5g} a second, at most {summary.peak_rate_per_s:.5g}")
        table.add_row("gaps", f"coefficient of variation {summary.gap_cv:.3g} (1 is Poisson)")
        table.add_row("drift", f"variance over mean of arrivals in windows {summary.dispersion:.3g}")
    if summary.conversations:
        mean = summary.num_requests / summary.conversations
        table.add_row(
            "conversations", f"{summary.conversations:,}, {mean:.3g} turns on average, {summary.most_turns} at most"
        )
    table.add_row("rank correlation", f"{summary.rank_correlation:.3g}, of prompt and output")
    of = "" if summary.reuse_requests == summary.num_requests else f", of the first {summary.reuse_requests:,} requests"
    shared = f"{summary.shared_token_share:.1%} of prompt tokens in {summary.shared_request_share:.1%} of requests"
    table.add_row("in earlier blocks", f"{shared}, blocks of {summary.block_tokens}{of}")
    console.print(table)
    lengths = Table(box=None)
    lengths.add_column("tokens")
    for heading in ("mean", *(f"p{100 * p:g}" for p in QUANTILES)):
        lengths.add_column(heading, justify="right")
    for name, counts in (("prompt", summary.prompt), ("output", summary.output)):
        lengths.add_row(name, f"{counts.mean():.1f}", *(str(value) for value in counts.quantiles(QUANTILES)))
    console.print(lengths)


def _show_comparison(rows: list[Compared]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for heading in ("", "trace", "generator", "difference"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(row.name, f"{row.trace:.5g}", f"{row.stand_in:.5g}", _difference(row))
    Console(stderr=True, highlight=False).print(table)


def _difference(row: Compared) -> str:
    return "" if row.error is None else f"{row.error:+.1%}"


def _draw(summary: Summary, title: str, file: Path) -> None:
    """Rate over time, histograms of lengths, and prompt against output."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    (over_time, both), (prompts, outputs) = figure.subplots(2, 2)
    if summary.windows:
        rates = np.array(summary.windows) / summary.window_s
        over_time.stairs(rates, np.arange(len(rates) + 1) * summary.window_s, fill=True)
    over_time.set(title="Arrivals", xlabel="s", ylabel="requests a second")
    both.scatter(*summary.pairs[:, :2].T, s=4, alpha=0.3, linewidths=0)
    both.set(title="Lengths", xlabel="prompt tokens", ylabel="output tokens", xscale="log", yscale="log")
    for axes, counts, name in ((prompts, summary.prompt, "prompt"), (outputs, summary.output, "output")):
        values = np.array(sorted(counts.counts))
        edges = np.geomspace(max(values[0], 1) * 0.999, values[-1] * 1.001, 60)
        axes.hist(values, bins=edges.tolist(), weights=[counts.counts[int(value)] for value in values])
        axes.set(xlabel=f"{name} tokens", ylabel="requests", xscale="log")
    figure.savefig(file, dpi=120)


# Writing


def _part(file: Path, stand_in: StandIn, rows: list[Compared]) -> str:
    from sim.scenario_schema import synthetic_from

    synthetic = synthetic_from(stand_in).model_dump(mode="json", exclude_defaults=True)
    lines = [f"# Fitted to {file.name} by `speckv workload fit`. Trace, generator and difference:"]
    lines += [f"#   {row.name:22} {row.trace:>10.5g} {row.stand_in:>10.5g} {_difference(row):>8}" for row in rows]
    if stand_in.rate_per_s is None:
        lines.append("# The trace has no arrival times; the rate is a placeholder.")
    lines += ["workload:", "  synthetic:"]
    lines += [f"    {key}: {_flow(value)}" for key, value in synthetic.items()]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return json.dumps(value)


def _as_profile(stand_in: StandIn) -> str:
    """The call that makes it, quantiles at `LEVELS` and rows of rates as text."""

    def tokens(points: tuple[tuple[float, int], ...]) -> str:
        return f'_tokens("{" ".join(str(value) for _, value in points)}")'

    lines = [
        f"num_requests={stand_in.num_requests}",
        f"rate_per_s={stand_in.rate_per_s}",
        f"burstiness={stand_in.burstiness}",
        f"prompt={tokens(stand_in.prompt)}",
        f"output={tokens(stand_in.output)}",
        f"rank_correlation={stand_in.rank_correlation}",
    ]
    if stand_in.shared is not None:
        shared = stand_in.shared
        lines.append(f"shared=Shared({shared.count}, {tokens(shared.tokens)}, {shared.fraction})")
    if stand_in.rates:
        rows = " ".join(f"{from_s:g}:{rate:g}" for from_s, rate in stand_in.rates)
        lines += [f'rates=_rows("{rows}")', f"repeat_s={stand_in.repeat_s}"]
    if stand_in.turns is not None:
        lines.append(f"turns={tokens(stand_in.turns)}")
    return "StandIn(\n" + "".join(f"    {line},\n" for line in lines) + ")"


# Telling


@contextmanager
def _errors_told() -> Iterator[None]:
    """What is wrong with the input becomes one message and exit code 2."""
    try:
        yield
    except ValueError as error:  # TraceError among them
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {error.filename}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("speckv: interrupted", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1.0)

        def told(rows: int, share: float) -> None:
            bar.update(task, completed=share, description=f"{rows:,} rows")

        yield told


def _fail(message: str) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(_BAD_INPUT)
