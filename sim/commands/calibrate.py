"""The commands `speckv calibrate fit`, `check` and `measure`: what is typed and printed.

Knows the terminal. The work is done in `calibration_fit`, `measured_tables` and `gpu_backend.measure`, imported when
asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from sim.measured_tables import Tables
    from sim.models.calibration import Calibration
    from sim.models.hardware import Hardware

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Fit step costs to measured tables, hold them against others, measure this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _fail(message: str, code: int) -> NoReturn:
    print(f"speckv: {message}", file=sys.stderr)
    raise SystemExit(code)


@app.command(
    epilog="""Examples:

    speckv calibrate fit aic_gemm_H200.csv aic_generation_attn_H200.csv --card h200 -o h200.yaml

    speckv calibrate fit measured.csv -o mine.yaml"""
)
def fit(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Measured tables, or vLLM logs.")],
    card: Annotated[
        str | None, typer.Option("--card", metavar="NAME", help="Whose they are. Default: as the tables or names say.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="CALIBRATION", help="Where other parts come from. Default: the card's own."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model of an iteration log, which has no name.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.yaml", help="Where it goes.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call it. Default: the file's name.")] = None,
) -> None:
    """Fit a calibration to measured tables, with shapes held out, and print the errors by part."""
    from sim.calibration_fit import fit_calibration
    from sim.calibration_schema import calibration_text
    from sim.models.shapes import ShapeError, UnknownName, load_shape

    tables = _tables(files)
    hardware = _card_of(card, tables)
    before = _calibration(base, hardware)
    try:
        shape = None if model is None else load_shape(model)
    except (UnknownName, ShapeError) as error:
        _fail(str(error), _BAD_INPUT)
    if tables.iterations and shape is None:
        print("speckv: warning: an iteration log is left out without --model", file=sys.stderr)
    called = name or (output.stem if output is not None else hardware.name.lower())
    try:
        made, lines = fit_calibration(tables, hardware, before, called, shape)
    except ValueError as error:
        _fail(str(error), _FAILED)
    _print_files(tables)
    print(f"held-out error, mean absolute percent ({hardware.name})")
    print(f"{'part':<28}{'points':>7}{'analytic':>10}{'grid':>7}  chosen")
    for line in lines:
        analytic = "-" if line.analytic is None else f"{line.analytic:.1f}"
        grid = "-" if line.grid is None else f"{line.grid:.1f}"
        print(f"{line.part:<28}{line.points:>7}{analytic:>10}{grid:>7}  {line.chosen}")
        if line.note:
            print(f"{'':<28}{line.note}")
    if output is not None:
        try:
            output.write_text(calibration_text(made), encoding="utf-8", newline="\n")
        except OSError as error:
            _fail(f"cannot write {output}: {error.strerror or error}", _FAILED)
        print(f"written to {output}; use it with --set timing.calibration={output}")


@app.command(
    epilog="""Example:

    speckv calibrate check a100 vidur_mlp_A100.csv --card a100"""
)
def check(
    calibration: Annotated[str, typer.Argument(metavar="CALIBRATION", help="A name, or a YAML file.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Measured tables.")],
    card: Annotated[
        str | None, typer.Option("--card", metavar="NAME", help="Whose tables they are. Default: the calibration's.")
    ] = None,
) -> None:
    """Hold a calibration against measurements, part by part."""
    from sim.calibration_fit import check_calibration

    tables = _tables(files)
    chosen = _calibration(calibration, None)
    hardware = _card_of(card or chosen.card, tables)
    lines = check_calibration(chosen, tables, hardware)
    _print_files(tables)
    if not lines:
        _fail("no part of the calibration is measured in these tables", _FAILED)
    print(f"{chosen.name} against {hardware.name}: mean absolute and mean error, percent")
    print(f"{'part':<44}{'points':>7}{'error':>8}{'bias':>8}")
    for line in lines:
        print(f"{line.part:<44}{line.points:>7}{line.error:>8.1f}{line.bias:>+8.1f}")


@app.command(
    epilog="""Examples:

    speckv calibrate measure --device cuda:0 --model llama-3.1-8b --out measured.csv

    speckv calibrate measure --device cpu --budget-s 20 --out try.csv"""
)
def measure(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The table; FILE with .yaml: the calibration.")],
    device: Annotated[str, typer.Option("--device", help="cuda:0 and the like, or cpu.")] = "cuda:0",
    model: Annotated[
        str, typer.Option("--model", help="Whose shapes are timed: a name or a config.json.")
    ] = "llama-3.1-8b",
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds to spend at most.")] = 240.0,
    tp: Annotated[int, typer.Option("--tp", help="Shapes as of one of so many ranks.")] = 1,
) -> None:
    """Time this machine's kernels at a model's shapes; write the table as it grows, then the fitted calibration."""
    from sim.models.shapes import ShapeError, UnknownName, load_shape

    try:
        shape = load_shape(model)
        shape.heads(tp)
    except (UnknownName, ShapeError) as error:
        _fail(str(error), _BAD_INPUT)
    try:
        from gpu_backend.measure import MeasureError, measure_machine
    except ImportError as error:
        _fail(f"measuring needs torch ({error}); install it with: pip install 'speckv[gpu]'", _FAILED)
    if shape.mla is not None:
        _fail(f"--model {model}: latent attention is not measured; a model with grouped-query heads is", _BAD_INPUT)
    layer = {linear.name: (linear.n, linear.k) for linear in shape.layer_linears(tp)}
    layer["lm_head"] = (shape.lm_head(tp).n, shape.lm_head(tp).k)
    heads, kv_heads = shape.heads(tp)
    try:
        outcome = measure_machine(
            out,
            device=device,
            model=shape.name,
            linears=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=shape.head_dim,
            budget_s=budget_s,
            say=lambda text: print(text, flush=True),
        )
    except MeasureError as error:
        _fail(str(error), _FAILED)
    for warning in outcome.warnings:
        print(f"speckv: warning: {warning}", file=sys.stderr)
    print(f"{outcome.rows} measurements in {out}")
    if outcome.rows:
        _fit_measured(out, outcome.card, outcome.worth)
    if outcome.interrupted:
        _fail(f"interrupted; what was measured until then is in {out}", _INTERRUPTED)


def _fit_measured(out: Path, card: str, worth: str) -> None:
    from dataclasses import replace

    from sim.calibration_fit import fit_calibration
    from sim.calibration_schema import calibration_text
    from sim.measured_tables import TableError, read_tables
    from sim.models.hardware import UnknownName, custom_hardware, hardware

    try:
        known = hardware(card)
    except UnknownName:
        # Nothing tells this card's peaks: shares of round numbers, so that the fit has something to be a share of.
        known = custom_hardware(card, bf16_tflops=100, bandwidth_gbs=1000, memory_gib=1, num_sms=1)
        if "cpu" in card.lower():
            known = custom_hardware(card, bf16_tflops=1, bandwidth_gbs=100, memory_gib=1, num_sms=1)
    target = out.with_suffix(".yaml")
    try:
        tables = read_tables([out])
        made, lines = fit_calibration(tables, known, _calibration(None, known), target.stem)
    except (TableError, ValueError) as error:
        print(f"speckv: warning: no calibration was fitted: {error}", file=sys.stderr)
        return
    for line in lines:
        analytic = "-" if line.analytic is None else f"{line.analytic:.1f}"
        grid = "-" if line.grid is None else f"{line.grid:.1f}"
        print(
            f"{line.part}: {line.points} points, held-out error {analytic} percent, with a grid {grid}: {line.chosen}"
        )
    made = replace(made, source=f"speckv calibrate measure on {card}: {worth}")
    target.write_text(calibration_text(made), encoding="utf-8", newline="\n")
    print(f"calibration in {target}; {worth}")


def _tables(files: list[Path]) -> Tables:
    from sim.measured_tables import TableError, read_tables

    try:
        return read_tables(files)
    except TableError as error:
        _fail(str(error), _BAD_INPUT)


def _print_files(tables: Tables) -> None:
    for path, format_ in tables.files:
        print(f"{path.name}: {format_}")


def _card_of(said: str | None, tables: Tables) -> Hardware:
    from sim.models.hardware import UnknownName, hardware, hardware_names
    from sim.models.names import plain

    if said is None:
        named = {name for name in tables.cards if name}
        texts = [path.stem for path, _ in tables.files]
        for name in hardware_names():
            short = name.split("-")[0] if name != "RTX-4090" else "RTX4090"
            if any(short.lower() in plain(text).replace("-", "") for text in texts):
                named.add(name)
        if len(named) != 1:
            found = f"they name {', '.join(sorted(named))}" if named else "neither the tables nor their names say"
            _fail(f"--card: whose tables are these? {found}; known: {', '.join(hardware_names())}", _BAD_INPUT)
        (said,) = named
    try:
        return hardware(said)
    except UnknownName as error:
        _fail(f"--card: {error}", _BAD_INPUT)


def _calibration(said: str | None, card: Hardware | None) -> Calibration:
    from sim.calibration_schema import calibration_names, load_calibration, read_calibration
    from sim.scenario_errors import ScenarioError

    try:
        if said is None:
            return load_calibration(None if card is None else card.calibration)
        if said not in calibration_names() and Path(said).exists():
            return read_calibration(Path(said))
        return load_calibration(said)
    except ScenarioError as error:
        _fail(str(error), _BAD_INPUT)
