"""`speckv acceptance`: fit what a server's drafts did, list published profiles, export to vLLM's synthetic acceptance.

Knows what is typed and printed. The reading is `sim.acceptance_sources`, the fitting `sim.models.acceptance_fit`; both
are imported only when asked for. Errors are one message on standard error, exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from sim.acceptance_sources import Source
    from sim.models.acceptance import AcceptanceModel
    from sim.models.acceptance_fit import Fit
    from sim.scenario import Scenario

__all__ = ["app"]

_BAD_INPUT = 2

app = typer.Typer(
    name="acceptance",
    help="Which drafts get accepted: fit models to what a server did, list published ones, export to vLLM.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command(
    epilog="""Examples:

    speckv acceptance fit server.log -o acceptance.yaml --picture fit.png

    speckv acceptance fit before.prom after.prom

    speckv acceptance fit recorded.jsonl.gz -k 5 --model beta --model markov_request

    speckv acceptance fit rates=0.67,0.435,0.278"""
)
def fit(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="vLLM log, metrics scrape (two are subtracted), vllm bench serve result, requests with "
            "per_step_accepted, recording; or rates=..., conditional=..., length=... typed in.",
        ),
    ],
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Fit this one; may be given several times.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", metavar="K", help="Drafts a step, where the source leaves it open.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", metavar="NAME", help="Column of a recording: eagle3 (default) or ngram.")
    ] = None,
    widths: Annotated[
        str | None, typer.Option("--widths", metavar="W,W,...", help="Candidates at each level; allows model tree.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.yaml", help="Write the best fit for a scenario.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw the fits against the data.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the fits as JSON.")] = False,
) -> None:
    """Fit acceptance models to a source and compare them by held-out likelihood.

    Without --model: every model that the source can support. The best one is written to -o: by held-out likelihood, or
    where nothing can be held out by Akaike's criterion.
    """
    from sim.acceptance_sources import read_sources
    from sim.models.acceptance import AcceptanceError
    from sim.models.acceptance_fit import MODELS, unsupported
    from sim.models.acceptance_fit import fit as fit_model

    try:
        levels = _widths(widths)
        source = read_sources(sources, k, drafter)
        chosen = list(dict.fromkeys(models or MODELS))
        reasons = {name: unsupported(name, source.evidence, levels) for name in chosen}
        for name in models or ():
            if reasons[name] is not None:
                _fail(f"--model {name}: {reasons[name]}")
        fits = [fit_model(name, source.evidence, widths=levels) for name in chosen if reasons[name] is None]
    except AcceptanceError as error:
        _fail(str(error))
    fits.sort(key=_score, reverse=True)
    best = fits[0]
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    for note in source.notes:
        print(f"speckv: {note}", file=sys.stderr)
    try:
        if output is not None:
            output.write_text(_yaml(best, source, sources), encoding="utf-8", newline="\n")
        if picture is not None:
            _draw(picture, source, fits)
    except OSError as error:
        _fail(f"cannot write {error.filename}: {error.strerror or error}")
    if as_json:
        print(json.dumps(_as_json(source, fits, left_out), indent=2))
    else:
        _print_table(source, fits, left_out)
        for place in (output, picture):
            if place is not None:
                print(f"written: {place}")


@app.command(
    epilog="""Example:

    speckv acceptance export scenario.yaml"""
)
def export(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario, or what `speckv acceptance fit -o` wrote.")
    ],
    k: Annotated[int | None, typer.Option("-k", metavar="K", help="Drafts a step; default: the scenario's.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="vLLM's method; default: the scenario's, or eagle3.")
    ] = None,
) -> None:
    """Print a --speculative-config for vLLM with synthetic acceptance at the scenario's rates.

    vLLM then accepts by these rates alone: bursts, and differences between requests, are not in them.
    """
    from sim.models.acceptance import AcceptanceError
    from sim.models.acceptance_models import drafted_share_of
    from sim.scenario import ScenarioError, load_scenario

    try:
        read = load_scenario(scenario)
        speculation = read.engine.speculative_config
        drafts = k if k is not None else None if speculation is None else speculation.num_speculative_tokens
        if drafts is None:
            _fail(f"{scenario}: has no engine.speculative_config: say how many drafts a step, with -k")
        if drafts < 1:
            _fail(f"-k {drafts}: must be 1 or more")
        model = _model_of(read)
        rates = _falling(model.unconditional_rates(drafts))
        share = drafted_share_of(model, drafts)
    except (ScenarioError, AcceptanceError) as error:
        _fail(str(error))
    config: dict[str, Any] = {"method": method or ("eagle3" if speculation is None else speculation.method)}
    if speculation is not None and speculation.model is not None:
        config["model"] = speculation.model
    config |= {
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    if share < 0.9995:
        print(
            f"speckv: {100 * share:.1f} percent of the steps have drafts; the rates are of those, as vLLM counts",
            file=sys.stderr,
        )
    print(f"--speculative-config '{json.dumps(config)}'")


@app.command()
def profiles(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """List published acceptance profiles with their sources."""
    from sim.models.acceptance_models import acceptance_model, tokens_per_step_of
    from sim.models.acceptance_profiles import ACCEPTANCE_PROFILES

    rows = []
    for name, profile in ACCEPTANCE_PROFILES.items():
        model = acceptance_model(profile.section, 0)
        rows.append(
            {
                "name": name,
                "drafter": profile.drafter,
                "target": profile.target,
                "task": profile.task,
                "k": profile.k,
                "mean_acceptance_length": round(model.mean_acceptance_length(profile.k), 3),
                "tokens_per_step": round(tokens_per_step_of(model, profile.k), 3),
                "acceptance": dict(profile.section),
                "source": profile.source,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['name']}: {row['drafter']} for {row['target']}, {row['task']}; K = {row['k']}, mean acceptance "
            f"length {row['mean_acceptance_length']:.2f}, tokens a step {row['tokens_per_step']:.2f}"
        )
        print(f"    {row['source']}")
    print("In a scenario: acceptance: {model: profile, name: eagle3-sharegpt}")


def _fail(message: str) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(_BAD_INPUT)


def _widths(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        _fail(f"--widths {text}: expected whole numbers with commas between them, such as 4,2,1")


def _score(fitted: Fit) -> float:
    if fitted.held_out is not None:
        return fitted.held_out
    if fitted.log_likelihood is not None and fitted.num_steps:
        return fitted.log_likelihood - len(fitted.parameters) / fitted.num_steps
    return float(len(fitted.parameters))


def _model_of(scenario: Scenario) -> AcceptanceModel:
    """The model of a scenario's `acceptance`; seeds do not matter to its rates."""
    from sim.models.acceptance import AcceptanceError, Replay, read_accepted_lengths
    from sim.models.acceptance_models import acceptance_model
    from sim.models.acceptance_profiles import ACCEPTANCE_PROFILES
    from sim.scenario import replay_path

    given = scenario.acceptance
    if given is None:
        raise AcceptanceError("the scenario has no acceptance and no speculative_config to take it from")
    if given.model == "replay":
        speculation = scenario.engine.speculative_config
        ngram = speculation is not None and speculation.method.startswith("ngram")
        column = given.drafter or ("ngram" if ngram else "eagle3")
        return Replay(read_accepted_lengths(replay_path(scenario), f"{column}_tokens_per_step"))
    section: Mapping[str, Any] = given.model_dump()
    if given.model == "profile":
        section = ACCEPTANCE_PROFILES[given.name].section
    return acceptance_model(section, 0)


def _falling(rates: Sequence[float]) -> list[float]:
    """Four decimals, never rising (vLLM refuses a rate above the one before)."""
    rounded: list[float] = []
    for rate in rates:
        value = round(min(max(rate, 0.0), 1.0), 4)
        rounded.append(min(value, rounded[-1]) if rounded else value)
    return rounded


# What is printed and written


def _figures(fitted: Fit) -> dict[str, float]:
    from sim.models.acceptance_models import accepted_variance, drafted_share_of, tokens_per_step_of

    model = fitted.build(0)
    return {
        "mean_acceptance_length": round(model.mean_acceptance_length(fitted.k), 4),
        "tokens_per_step": round(tokens_per_step_of(model, fitted.k), 4),
        "drafted_share": round(drafted_share_of(model, fitted.k), 4),
        "variance": round(accepted_variance(model, fitted.k), 4),
    }


def _as_json(source: Source, fits: Sequence[Fit], left_out: Mapping[str, str]) -> dict[str, Any]:
    return {
        "source": source.kind,
        "k": source.evidence.k,
        "num_steps": fits[0].num_steps,
        "notes": list(source.notes),
        "fits": [
            {
                "model": fitted.model,
                "acceptance": dict(fitted.section),
                "parameters": [
                    {"name": p.name, "value": p.value, "low": p.low, "high": p.high} for p in fitted.parameters
                ],
                "log_likelihood_per_step": fitted.log_likelihood,
                "held_out_per_step": fitted.held_out,
                **_figures(fitted),
                "unconditional_rates": fitted.build(0).unconditional_rates(fitted.k),
                "conditional_rates": fitted.build(0).conditional_rates(fitted.k),
                "notes": list(fitted.notes),
            }
            for fitted in fits
        ],
        "not_fitted": dict(left_out),
    }


def _print_table(source: Source, fits: Sequence[Fit], left_out: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = f", {fits[0].num_steps} steps" if fits[0].num_steps else ""
    table = Table(title=f"{source.kind}, K = {source.evidence.k}{steps}", title_justify="left")
    table.add_column("model")
    table.add_column("parameters (95 percent)")
    table.add_column("held-out nats a step", justify="right")
    table.add_column("tokens a step", justify="right")
    for fitted in fits:
        figures = _figures(fitted)
        held_out = "-" if fitted.held_out is None else f"{fitted.held_out:.4f}"
        table.add_row(fitted.model, _parameters(fitted), held_out, f"{figures['tokens_per_step']:.3f}")
    console = Console()
    console.print(table)
    for fitted in fits:
        for note in fitted.notes:
            console.print(f"{fitted.model}: {note}", highlight=False)
    for reason in dict.fromkeys(left_out.values()):
        names = ", ".join(name for name, given in left_out.items() if given == reason)
        console.print(f"not fitted: {names}: {reason}", highlight=False)


def _parameters(fitted: Fit) -> str:
    shown = []
    for parameter in fitted.parameters[:8]:
        text = f"{parameter.name} {parameter.value:.4g}"
        if parameter.low is not None and parameter.high is not None:
            text += f" ({parameter.low:.4g} to {parameter.high:.4g})"
        shown.append(text)
    if len(fitted.parameters) > 8:
        shown.append(f"and {len(fitted.parameters) - 8} more (--json)")
    return "\n".join(shown)


def _yaml(fitted: Fit, source: Source, names: Sequence[str]) -> str:
    lines = [
        f"# {fitted.model}, fitted at K = {fitted.k} to {fitted.num_steps} steps of {', '.join(names)} "
        f"({source.kind}).",
    ]
    if fitted.held_out is not None:
        lines.append(f"# Held-out log-likelihood: {fitted.held_out:.4f} nats a step.")
    lines += [f"# {note}" for note in (*source.notes, *fitted.notes)]
    for parameter in fitted.parameters:
        if parameter.low is not None and parameter.high is not None:
            lines.append(
                f"# {parameter.name}: {parameter.value:.6g}, 95 percent {parameter.low:.6g} to {parameter.high:.6g}"
            )
    lines.append("acceptance:")
    # JSON is YAML: lists stay on a line of their own.
    lines += [f"  {key}: {json.dumps(value)}" for key, value in fitted.section.items()]
    return "\n".join(lines) + "\n"


def _draw(file: Path, source: Source, fits: Sequence[Fit]) -> None:
    """Rates by position, data against fits; with requests, also their mean tokens a step against the best fit's."""
    import numpy as np
    from matplotlib.figure import Figure

    from sim.models.acceptance_fit import Counts, Steps
    from sim.models.acceptance_models import walked_runs

    evidence = source.evidence
    k = evidence.k
    places = list(range(1, k + 1))
    by_request = isinstance(evidence, Steps) and len(evidence.accepted) > 1
    figure = Figure(figsize=(10 if by_request else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if by_request else 1, squeeze=False)[0]
    data: list[float] | None = None
    if isinstance(evidence, Counts):
        data = (evidence.accepted.sum(axis=0) / evidence.num_drafts.sum()).tolist()
    elif isinstance(evidence, Steps):
        data = [float((evidence.flat.accepted >= i).mean()) for i in places]
    elif evidence.rates is not None:
        data = list(evidence.rates)
    if data is not None:
        axes[0].bar(places, data, color="#BBBBBB", label="data")
    for fitted, colour in zip(fits, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), strict=False):
        axes[0].plot(
            places, fitted.build(0).unconditional_rates(k), "o-", color=colour, label=fitted.model, markersize=3
        )
    axes[0].set(xlabel="draft", ylabel="accepted, share of the steps with drafts", xticks=places, ylim=(0, 1))
    axes[0].legend(frameon=False, fontsize=8)
    if by_request:
        assert isinstance(evidence, Steps)
        model = fits[0].build(0)
        seen = [a for a in evidence.accepted if a.size]
        drawn = [walked_runs(model, r, k, int(a.size + a.sum()) + 1)[0] for r, a in enumerate(seen)]
        means = [1 + float(a.mean()) for a in seen]
        edges = np.linspace(1, max(max(means), 1.5), 30)
        axes[1].hist(means, bins=edges.tolist(), color="#BBBBBB", label="data")
        axes[1].hist(
            [1 + float(a.mean()) for a in drawn if a.size],
            bins=edges.tolist(),
            histtype="step",
            color="#0072B2",
            label=f"drawn from {fits[0].model}",
        )
        axes[1].set(xlabel="tokens a step of a request", ylabel="requests")
        axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)
