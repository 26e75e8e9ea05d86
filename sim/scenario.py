"""From a YAML file and ``--set`` overrides to a `Scenario` that makes sense, or a `ScenarioError` that says why not.

Knows: the rules between sections, and defaults that depend on the model, the card or the drafter. Must not know: the
engine, the core, observers, or how YAML is spelled (`scenario_source`). What may be written is in `scenario_schema`.

Nothing but `ScenarioError` comes out of `load_scenario` for any file and any overrides.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

import workloads.lengths
from sim.calibration_schema import calibration_names, load_calibration, read_calibration
from sim.models.calibration import Calibration
from sim.models.hardware import Hardware, custom_hardware, hardware
from sim.models.memory import batch_limits
from sim.models.names import UnknownName
from sim.models.shapes import DrafterShape, ModelShape, ShapeError, drafter_shape, load_shape
from sim.policies.axes import DRAFTER_KV, RESERVATION, UNDO
from sim.policies.drafter_kv import NOWHERE, DrafterKV
from sim.policies.drafters import DRAFTERS
from sim.policies.presets import PRESETS, TRAITS
from sim.policies.reservation import WorstCase
from sim.scenario_errors import Problem, ScenarioError, nearest_name
from sim.scenario_messages import problem_at, rename_aliases, translate
from sim.scenario_schema import (
    Abort,
    Card,
    ExponentialSeconds,
    FixedTokens,
    Geometric,
    LognormalSeconds,
    LognormalTokens,
    PerPosition,
    Profile,
    Replay,
    Scenario,
    Seconds,
    Synthetic,
    Tokens,
    TraceFile,
    UniformTokens,
)
from sim.scenario_source import MAX_BYTES, Source, apply_override, read_file
from sim.shipped import shipped_scenarios

__all__ = [
    "ACCEPTANCE_RATES",
    "NEEDS_SPECULATION",
    "Problem",
    "Scenario",
    "ScenarioError",
    "calibration",
    "card",
    "check_fits",
    "drafter",
    "drafter_kv",
    "length_files",
    "lengths",
    "lengths_path",
    "load_scenario",
    "replay_path",
    "resolved_scenario",
    "target_shape",
    "think_ms",
    "trace_path",
    "weight_dtype",
]

NEEDS_SPECULATION: Final = ("tree_widths", "draft_length", "drafter_kv", "drafter_pool_blocks", "lookahead", "undo")
"""Keys of `engine.policies` that have no meaning without `engine.speculative_config`."""

ACCEPTANCE_RATES: Final[Mapping[str, float]] = {
    # EAGLE-3, Llama-3.1-8B on ShareGPT (SpecDecode-Bench): conditional rates .61 .63 .66 .70 .72.
    "eagle3": 0.65,
    # No figure of its own was found: EAGLE-3's.
    "eagle": 0.65,
    # DeepSeek-V3 technical report: the second token is accepted 85 to 90 percent of the time.
    "mtp": 0.85,
    # Qwen3-1.7B drafting for Qwen3-32B, K = 3: 2.78 tokens a step = 1 + r + r^2 + r^3.
    "draft_model": 0.76,
    # N-gram on ShareGPT, K = 5 (SpecDecode-Bench): 1.45 tokens a step over all steps = 1 + r + ... + r^5. A rough
    # stand-in: matches come in bursts and then run long, which only a replay shows.
    "ngram": 0.31,
    "ngram_gpu": 0.31,
}
"""Conditional rate of the geometric acceptance that holds where a scenario says nothing, by method."""


def load_scenario(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file, or one of the shipped scenarios by its name, apply the overrides, check it, fill it in.

    ``path_or_name``: a path (with a suffix or a separator), or a name such as ``quickstart``. ``overrides``: strings
    ``engine.max_num_seqs=64``, the value in YAML, lists by index (``events.0.at_s=5``), later ones over earlier ones.
    The scenario that comes back has no default left open but those that need the memory model (`num_gpu_blocks`).
    Raises ScenarioError with every problem found, and nothing else.
    """
    return _loaded(read_file(_find_scenario(path_or_name)), overrides)


def resolved_scenario(resolved: Mapping[str, Any], file: Path | None, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario that `Scenario.resolved` gave this of, with its file, from which paths in it count.

    Raises ScenarioError as `load_scenario` does, so also where a release of speckv does not know a key any more.
    """
    return _loaded(Source(copy.deepcopy(dict(resolved)), file, {}), overrides)


def _loaded(source: Source, overrides: Sequence[str]) -> Scenario:
    for override in overrides:
        apply_override(source, override)
    problems = rename_aliases(source)
    if problems:
        raise ScenarioError(problems, source.label)
    if "name" not in source.data and source.file is not None:
        source.data["name"] = _name_from(source.file)
    try:
        written = Scenario.model_validate(source.data)
    except ValidationError as error:
        raise ScenarioError(translate(error, source), source.label) from None
    written._file = source.file
    return _Settling(written, source).settled()


def lengths(tokens: Tokens) -> workloads.lengths.Lengths:
    """The distribution that a `Tokens` of the scenario describes. Raises ValueError where its numbers do not fit."""
    if isinstance(tokens, FixedTokens):
        return workloads.lengths.Fixed(tokens.tokens)
    if isinstance(tokens, UniformTokens):
        return workloads.lengths.Uniform(tokens.min, tokens.max)
    if isinstance(tokens, LognormalTokens):
        return workloads.lengths.LogNormal(tokens.median, tokens.sigma, tokens.min, tokens.max)
    return workloads.lengths.Quantiles([(point[0], point[1]) for point in tokens.points])


def card(scenario: Scenario) -> Hardware:
    """The card of the scenario. Raises UnknownName or ValueError (`load_scenario` has checked that it does not)."""
    if isinstance(scenario.hardware, str):
        return hardware(scenario.hardware)
    own = scenario.hardware
    return custom_hardware(
        own.name,
        bf16_tflops=own.tflops,
        bandwidth_gbs=own.bandwidth_gb_s,
        memory_gib=own.memory_gb,
        num_sms=own.num_sms,
    )


def calibration(scenario: Scenario) -> Calibration:
    """What the card's kernels reach: `timing.calibration`, else the card's own, else the one that stands in.

    Raises ScenarioError for a name that is not known or a file that is wrong.
    """
    named = scenario.timing.calibration
    if named is None:
        return load_calibration(card(scenario).calibration)
    if named in calibration_names():
        return load_calibration(named)
    found = _look_for(scenario, named)
    return load_calibration(named) if found is None else read_calibration(found)


def weight_dtype(scenario: Scenario) -> str:
    """The type of the linear layers' weights."""
    return scenario.engine.quantization or scenario.engine.dtype


def target_shape(scenario: Scenario) -> ModelShape:
    """The model's shape; a path counts from the scenario's folder, then from the working directory.

    Raises UnknownName or ShapeError (`load_scenario` has checked that it does not).
    """
    return _shape(scenario, scenario.model)


def drafter(scenario: Scenario) -> DrafterShape | None:
    """The drafter's shape; None without speculation.

    A checkpoint name that is not known for eagle, eagle3 or mtp counts as a head of the target's shape. Raises
    UnknownName or ShapeError (`load_scenario` has checked that it does not).
    """
    speculation = scenario.engine.speculative_config
    if speculation is None:
        return None
    method = "ngram" if speculation.method == "ngram_gpu" else speculation.method
    model = speculation.model
    if model is not None:
        found = _look_for(scenario, model)
        if found is not None:
            _refuse_special(found)
            model = str(found)
    target = target_shape(scenario)
    try:
        return drafter_shape(target, method, model)
    except UnknownName:
        if method == "draft_model":
            raise
        return drafter_shape(target, method, None)


def trace_path(scenario: Scenario) -> Path:
    """The file of `workload.trace`. Raises ScenarioError if it is not there, saying where it was looked for."""
    trace = scenario.workload.trace
    if trace is None:
        raise ValueError("the scenario has no workload.trace")
    return _existing(scenario, trace.path, "workload.trace.path")


def lengths_path(scenario: Scenario, trace: TraceFile, section: str) -> Path:
    """The file of a `lengths_from` in `section`. Raises ScenarioError if it is not there."""
    return _existing(scenario, trace.path, f"{section}.lengths_from.path")


def length_files(scenario: Scenario) -> list[Path]:
    """The files that lengths are drawn from, of all tenants. Raises ScenarioError if one is not there."""
    workload = scenario.workload
    sections = [("workload.synthetic", workload.synthetic)]
    for number, tenant in enumerate(workload.tenants or ()):
        sections.append((f"workload.tenants.{number}.synthetic", tenant.synthetic))
    return [
        lengths_path(scenario, synthetic.lengths_from, section)
        for section, synthetic in sections
        if synthetic is not None and synthetic.lengths_from is not None
    ]


def think_ms(seconds: Seconds) -> workloads.lengths.Lengths | None:
    """The distribution, in milliseconds, that a `Seconds` of the scenario describes; None for no time at all."""
    if isinstance(seconds, ExponentialSeconds):
        mean_ms = seconds.mean * 1e3
        tail = [k / 64 for k in range(64)] + [1 - 2.0**-k for k in range(7, 40)]
        points = [(p, max(1.0, -mean_ms * math.log1p(-p))) for p in tail]
        return workloads.lengths.Quantiles([(p, min(ms, 2.0**31 - 1)) for p, ms in [*points, (1.0, points[-1][1])]])
    if isinstance(seconds, LognormalSeconds):
        most = max(1, round(seconds.max * 1e3))
        return workloads.lengths.LogNormal(seconds.median * 1e3, seconds.sigma, 1, most)
    ms = round(seconds * 1e3)
    return workloads.lengths.Fixed(ms) if ms else None


def replay_path(scenario: Scenario) -> Path:
    """The file of a replayed `acceptance`. Raises ScenarioError if it is not there, saying where it was looked for."""
    if not isinstance(scenario.acceptance, Replay):
        raise ValueError("the scenario's acceptance is no replay")
    return _existing(scenario, scenario.acceptance.path, "acceptance.path")


def check_fits(num_blocks: int, block_size: int, max_len: int, what: str = "the longest request") -> None:
    """Raise ScenarioError if ``max_len`` tokens of one request cannot lie in an otherwise empty pool.

    ``num_blocks`` counts the null block, which holds nothing; ``max_len`` counts all slots the request needs at once,
    lookahead included. A request that does not fit would be preempted and resumed for ever.
    """
    needed, usable = -(-max_len // block_size), num_blocks - 1
    if needed > usable:
        reason = (
            f"{what} needs {needed} blocks ({max_len} tokens in blocks of {block_size}) and the pool has {usable} "
            "besides the null block"
        )
        raise ScenarioError([Problem(reason, "engine.num_gpu_blocks", num_blocks, f"{needed + 1} or more blocks")])


def drafter_kv(scenario: Scenario) -> DrafterKV:
    """Where the drafter's KV lives, by the scenario's policies and its preset; `NOWHERE` for n-grams and without
    one."""
    speculation = scenario.engine.speculative_config
    if speculation is None or speculation.method.startswith("ngram"):
        return NOWHERE
    if scenario.engine.policies.drafter_kv is not None:
        return DRAFTER_KV[scenario.engine.policies.drafter_kv]
    traits = TRAITS[scenario.engine.preset]
    if speculation.method == "draft_model" and traits.drafter_kv_of_two_models is not None:
        return traits.drafter_kv_of_two_models
    return traits.drafter_kv


# Finding files


def _find_scenario(path_or_name: str | Path) -> Path:
    text = str(path_or_name)
    if isinstance(path_or_name, Path) or Path(text).suffix in (".yaml", ".yml") or "/" in text or "\\" in text:
        return Path(path_or_name)
    if not text or len(text) > 255 or "\0" in text:
        raise ScenarioError(
            [Problem("is no name of a scenario", value=text, key="scenario", allowed="a path or a name")]
        )
    try:
        folder = shipped_scenarios()
    except FileNotFoundError as error:
        raise ScenarioError([Problem(str(error))]) from None
    shipped = sorted(file.stem for file in folder.glob("*.yaml"))
    if text in shipped:
        return folder / f"{text}.yaml"
    if Path(text).exists():
        return Path(text)
    raise ScenarioError(
        [
            Problem(
                "there is no scenario of that name",
                key="scenario",
                value=text,
                allowed=f"a path to a YAML file, or one of {', '.join(shipped)}",
                nearest=nearest_name(text, shipped),
            )
        ]
    )


def _name_from(file: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", file.stem).lstrip("._-")[:100]
    return name or "scenario"


def _places_to_look(scenario: Scenario, text: str) -> list[Path]:
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    if path.is_absolute() or scenario.file is None:
        return [path]
    return [scenario.file.parent / path, path]


def _look_for(scenario: Scenario, text: str) -> Path | None:
    try:
        return next((path for path in _places_to_look(scenario, text) if path.exists()), None)
    except (OSError, ValueError, RuntimeError):  # too long, a null character, no such home
        return None


def _existing(scenario: Scenario, text: str, key: str) -> Path:
    found = _look_for(scenario, text)
    if found is not None and found.is_file():
        return found
    looked = " nor ".join(str(path) for path in _places_to_look(scenario, text))
    reason = "is not a file" if found is not None else f"there is no such file: neither {looked}"
    allowed = f"an existing file; on the command line: --set {key}=FILE"
    label = None if scenario.file is None else str(scenario.file)
    raise ScenarioError([Problem(reason, key, text, allowed, file=label)], label)


def _refuse_special(path: Path) -> None:
    file = path / "config.json" if path.is_dir() else path
    if file.exists() and (not file.is_file() or file.stat().st_size > MAX_BYTES):
        raise ShapeError(f"{file}: is not a file of at most {MAX_BYTES} bytes; expected a Hugging Face config.json")


def _shape(scenario: Scenario, text: str) -> ModelShape:
    found = _look_for(scenario, text)
    if found is None:
        return load_shape(text)
    try:
        return load_shape(text) if found.is_dir() and not (found / "config.json").exists() else _shape_at(found, text)
    except OSError as error:
        raise ShapeError(f"{found}: cannot be read ({error.strerror})") from None


def _shape_at(found: Path, text: str) -> ModelShape:
    _refuse_special(found)
    return load_shape(found if found.is_absolute() else Path(".") / found)


# Rules between sections


class _Settling:
    """One pass over a scenario that is right section by section: collects problems and warnings, fills in defaults."""

    def __init__(self, scenario: Scenario, source: Source) -> None:
        self.scenario = scenario
        self.source = source
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def refuse(self, key: str, reason: str, allowed: str = "", nearest: str | None = None) -> None:
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        self.problems.append(problem_at(self.source, path, reason, allowed, nearest))

    def _unknown(self, key: str, error: UnknownName, otherwise: str) -> None:
        names = [name for name in error.known if "/" not in name]  # without the organisations on Hugging Face
        nearest = error.nearest[0] if error.nearest else None
        self.refuse(key, "is not known", f"{otherwise}, or one of {', '.join(names)}", nearest)

    def settled(self) -> Scenario:
        """The scenario with its defaults, or ScenarioError."""
        shape, own_card = self._model(), self._card()
        self._preset()
        if shape is None or own_card is None:
            raise ScenarioError(self.problems, self.source.label)
        self._engine(shape, own_card)
        self._speculation(shape)
        self._policies()
        self._acceptance()
        if self.problems:  # what follows reads what these have settled
            raise ScenarioError(self.problems, self.source.label)
        self._workload()
        self._events()
        if self.problems:
            raise ScenarioError(self.problems, self.source.label)
        self.scenario._warnings = tuple(self.warnings)
        return self.scenario

    def _update_engine(self, **values: object) -> None:
        engine = self.scenario.engine.model_copy(update=values)
        self.scenario = self.scenario.model_copy(update={"engine": engine})

    def _model(self) -> ModelShape | None:
        try:
            return target_shape(self.scenario)
        except UnknownName as error:
            self._unknown("model", error, "a config.json")
        except (ShapeError, OSError, ValueError) as error:
            self.refuse("model", str(error))
        return None

    def _card(self) -> Hardware | None:
        try:
            return card(self.scenario)
        except UnknownName as error:
            self._unknown("hardware", error, f"a mapping with the keys {', '.join(Card.model_fields)}")
        except (ValueError, OverflowError) as error:
            self.refuse("hardware", str(error))
        return None

    def _preset(self) -> None:
        name = self.scenario.engine.preset
        if name not in PRESETS:
            names = list(PRESETS)
            self.refuse("engine.preset", "is not known", ", ".join(names), nearest_name(name, names))

    def _engine(self, shape: ModelShape, own_card: Hardware) -> None:
        """vLLM's defaults and checks: EngineArgs.get_batch_defaults, SchedulerConfig.verify_max_model_len."""
        engine = self.scenario.engine
        try:
            shape.linears(engine.tensor_parallel_size)
            shape.experts(engine.tensor_parallel_size)
        except ValueError as error:
            self.refuse("engine.tensor_parallel_size", str(error))
        self._timing(own_card)

        longest = shape.max_position_embeddings
        max_model_len = engine.max_model_len
        if max_model_len is None:
            max_model_len = longest
        elif max_model_len > longest:
            self.refuse(
                "engine.max_model_len", f"{shape.name} has max_position_embeddings {longest}", f"up to {longest}"
            )

        seqs, tokens = batch_limits(
            own_card,
            max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
        )
        if tokens < seqs:
            key = (
                "engine.max_num_batched_tokens" if engine.max_num_batched_tokens is not None else "engine.max_num_seqs"
            )
            reason = f"max_num_batched_tokens {tokens} is below max_num_seqs {seqs}, which vLLM refuses"
            self.refuse(key, reason, "max_num_batched_tokens >= max_num_seqs")
        if engine.long_prefill_token_threshold > max_model_len:
            reason = f"is above max_model_len {max_model_len}, which vLLM refuses"
            self.refuse("engine.long_prefill_token_threshold", reason, f"0 to {max_model_len}")

        speculation = engine.speculative_config
        runs_async = speculation is None or DRAFTERS[speculation.method].runs_async
        traits = TRAITS.get(engine.preset)
        if traits is not None and not traits.runs_async:
            if engine.async_scheduling:
                self.refuse("engine.async_scheduling", f"{engine.preset} does not overlap", "false or null")
            runs_async = False
        elif engine.async_scheduling and not runs_async:
            assert speculation is not None
            able = ", ".join(name for name, entry in DRAFTERS.items() if entry.runs_async and name != "none")
            reason = f"vLLM refuses asynchronous scheduling with method {speculation.method}"
            self.refuse("engine.async_scheduling", reason, f"false or null, or a method of {able}")
        elif engine.async_scheduling is None and not runs_async:
            assert speculation is not None
            self.warnings.append(
                f"engine.async_scheduling: off, because vLLM does not run method {speculation.method} asynchronously "
                "(ngram_gpu it does)"
            )
        settled_async = runs_async if engine.async_scheduling is None else engine.async_scheduling
        self._update_engine(
            max_model_len=max_model_len,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            async_scheduling=settled_async,
        )
        if engine.num_gpu_blocks is not None:
            needed = -(-max_model_len // engine.block_size)
            if needed > engine.num_gpu_blocks - 1:
                self.warnings.append(
                    f"engine.num_gpu_blocks: {engine.num_gpu_blocks} blocks do not hold one request of max_model_len "
                    f"{max_model_len}, which takes {needed}: vLLM would not start; requests that fit are simulated"
                )

    def _timing(self, own_card: Hardware) -> None:
        timing, tp = self.scenario.timing, self.scenario.engine.tensor_parallel_size
        if timing.jitter is not None and timing.fixed_step_ms is not None:
            self.refuse("timing.jitter", "with fixed_step_ms every step takes exactly that", "null")
        try:
            forms = calibration(self.scenario).for_card(own_card)
        except ScenarioError as error:
            self.refuse("timing.calibration", "; ".join(str(problem) for problem in error.problems))
            return
        try:
            if tp > 1:
                forms.allreduce_for(tp)
        except ValueError as error:
            self.refuse("engine.tensor_parallel_size", str(error))
        if timing.jitter is not None and timing.jitter.model == "residuals" and not forms.residuals:
            self.refuse("timing.jitter.model", f"calibration {forms.name} has no residuals", "lognormal")

    def _speculation(self, shape: ModelShape) -> None:
        engine = self.scenario.engine
        speculation = engine.speculative_config
        if speculation is None:
            return
        section = "engine.speculative_config"
        k = speculation.num_speculative_tokens
        kind = DRAFTERS[speculation.method]
        budget = engine.max_num_batched_tokens
        per_request = engine.preset not in PRESETS or PRESETS[engine.preset].draft_slots_per_request
        taken = kind.draft_slots * (1 if per_request else engine.max_num_seqs)
        if budget - taken < k + 1:
            for_drafts = f", of which drafting takes {taken}" if taken else ""
            reason = f"one verification takes K + 1 = {k + 1} tokens and max_num_batched_tokens is {budget}{for_drafts}"
            self.refuse(
                f"{section}.num_speculative_tokens", reason, f"max_num_batched_tokens of {k + 1 + taken} or more"
            )
        if k + 1 >= engine.max_model_len:
            reason = f"one verification takes K + 1 = {k + 1} tokens and max_model_len is {engine.max_model_len}"
            self.refuse(f"{section}.num_speculative_tokens", reason)
        if speculation.draft_tensor_parallel_size not in (None, 1, engine.tensor_parallel_size):
            self.refuse(
                f"{section}.draft_tensor_parallel_size",
                "vLLM wants 1 or tensor_parallel_size",
                " or ".join(dict.fromkeys(("1", str(engine.tensor_parallel_size)))),
            )
        for row in speculation.num_speculative_tokens_per_batch_size or ():
            if row[2] > k:
                self.warnings.append(
                    f"{section}.num_speculative_tokens_per_batch_size: row {row} asks for more than "
                    f"num_speculative_tokens {k} and gets {k}, as in vLLM"
                )
        try:
            drafter(self.scenario)
        except UnknownName as error:
            self._unknown(f"{section}.model", error, "a config.json")
        except (ShapeError, OSError, ValueError) as error:
            self.refuse(f"{section}.model" if speculation.model else f"{section}.method", str(error))

    def _policies(self) -> None:
        """Combinations that mean nothing."""
        engine = self.scenario.engine
        policies = engine.policies
        section = "engine.policies"
        speculation = engine.speculative_config
        rules = PRESETS.get(engine.preset)
        if rules is None:
            return
        undo = rules.undo if policies.undo is None else UNDO[policies.undo]
        if speculation is None:
            for key in NEEDS_SPECULATION:
                if getattr(policies, key) not in (None, "fixed"):
                    self.refuse(f"{section}.{key}", "has no meaning without speculative_config", "null")
            return
        if policies.tree_widths is None:
            if undo.compacts:
                self.refuse(
                    f"{section}.undo", "compact moves the branch of a token tree, and there is none", "tree_widths"
                )
        else:
            nodes = sum(policies.tree_widths)
            if not undo.compacts:
                self.refuse(
                    f"{section}.tree_widths", "a tree's accepted branch is scattered over its slots", "undo: compact"
                )
            if nodes != speculation.num_speculative_tokens:
                self.refuse(
                    "engine.speculative_config.num_speculative_tokens",
                    f"the tree {policies.tree_widths} has {nodes} drafts",
                    str(nodes),
                )
            if speculation.method.startswith("ngram"):
                self.refuse(f"{section}.tree_widths", "n-grams propose a chain", "another method")
            if policies.draft_length not in (None, "fixed") or speculation.num_speculative_tokens_per_batch_size:
                self.refuse(f"{section}.tree_widths", "a tree's K is fixed", "draft_length: fixed")
        if policies.draft_length not in (None, "fixed") and speculation.num_speculative_tokens_per_batch_size:
            self.refuse(
                f"{section}.draft_length", "num_speculative_tokens_per_batch_size sets K already", "fixed or null"
            )
        if policies.draft_length == "best_by_cost" and self.scenario.timing.fixed_step_ms is not None:
            self.refuse(f"{section}.draft_length", "with fixed_step_ms every K costs the same", "fixed or adaptive")
        reservation = rules.reservation if policies.reservation is None else RESERVATION[policies.reservation]
        if undo.frees and isinstance(reservation, WorstCase):
            self.refuse(
                f"{section}.reservation",
                "worst_case reserves for good what this undo would give back",
                "undo: overwrite, or another reservation",
            )
        if policies.drafter_kv in ("own_pool_freed", "own_pool_kept") and speculation.method.startswith("ngram"):
            self.refuse(f"{section}.drafter_kv", "n-grams have no KV", "none, shared or null")
        if policies.drafter_pool_blocks is not None and not drafter_kv(self.scenario).own_pool:
            self.refuse(
                f"{section}.drafter_pool_blocks", "the drafter has no pool of its own", "drafter_kv: own_pool_..."
            )

    def _acceptance(self) -> None:
        speculation = self.scenario.engine.speculative_config
        if speculation is None:
            return
        k = speculation.num_speculative_tokens
        given = self.scenario.acceptance
        rates, length = speculation.synthetic_acceptance_rates, speculation.synthetic_acceptance_length
        if given is None:
            settled: Geometric | PerPosition
            if rates is not None:
                settled = PerPosition(model="per_position", rates=rates, convention="unconditional")
            elif length is not None:
                settled = PerPosition(
                    model="per_position", rates=_rates_from_length(length, k), convention="unconditional"
                )
            else:
                settled = Geometric(model="geometric", rate=ACCEPTANCE_RATES[speculation.method])
            self.scenario = self.scenario.model_copy(update={"acceptance": settled})
            return
        if isinstance(given, PerPosition) and len(given.rates) < k:
            self.refuse(
                "acceptance.rates", f"{len(given.rates)} rates for num_speculative_tokens {k}", f"{k} or more rates"
            )

    def _workload(self) -> None:
        given = self.scenario.workload
        update: dict[str, Any] = {}
        if given.trace is not None:
            self._trace_file("workload.trace", given.trace)
        elif given.tenants is not None:
            settled = []
            for number, tenant in enumerate(given.tenants):
                section = f"workload.tenants.{number}"
                synthetic = self._one_synthetic(section, tenant.synthetic, tenant.profile)
                settled.append(tenant.model_copy(update={"synthetic": synthetic, "profile": None}))
            update["tenants"] = settled
        else:
            update["synthetic"] = self._one_synthetic("workload", given.synthetic, given.profile)
            update["profile"] = None
        workload = given.model_copy(update=update)
        self.scenario = self.scenario.model_copy(update={"workload": workload})

    def _one_synthetic(self, section: str, synthetic: Synthetic | None, profile: Profile | None) -> Synthetic:
        if profile is not None:
            synthetic, section = profile.as_synthetic(), f"{section}.profile"
        else:
            section = f"{section}.synthetic"
        assert synthetic is not None
        synthetic = self._settled_lengths(synthetic, self.scenario.engine.max_model_len)
        if synthetic.lengths_from is not None:
            self._trace_file(f"{section}.lengths_from", synthetic.lengths_from)
        self._check_synthetic(section, synthetic)
        return synthetic

    def _trace_file(self, section: str, trace: TraceFile) -> None:
        if trace.columns is not None and trace.format not in ("auto", "columns"):
            self.refuse(f"{section}.columns", f"has no meaning with format {trace.format}", "format: columns")

    def _check_synthetic(self, section: str, synthetic: Synthetic) -> None:
        engine = self.scenario.engine
        if synthetic.priority is not None and engine.scheduling_policy != "priority":
            self.refuse(f"{section}.priority", "has no meaning under fcfs", "engine.scheduling_policy: priority")

        largest: dict[str, int] = {}
        parts: dict[str, Tokens] = {
            "prompt_tokens": synthetic.prompt_tokens,
            "output_tokens": synthetic.output_tokens,
        }
        if synthetic.shared_prefix is not None:
            parts["shared_prefix.tokens"] = synthetic.shared_prefix.tokens
        if synthetic.conversations is not None:
            parts["conversations.turns"] = synthetic.conversations.turns
            if synthetic.conversations.first_prompt_tokens is not None:
                parts["conversations.first_prompt_tokens"] = synthetic.conversations.first_prompt_tokens
        for key, tokens in parts.items():
            try:
                largest[key] = workloads.lengths.largest(lengths(tokens))
            except (ValueError, OverflowError) as error:
                self.refuse(f"{section}.{key}", str(error))
        if len(largest) < len(parts):
            return
        prefix = largest.get("shared_prefix.tokens", 0)
        prompt = largest.get("conversations.first_prompt_tokens", largest["prompt_tokens"]) + prefix
        output = largest["output_tokens"]
        said = f"prompts of up to {prompt} tokens" + (f" ({prefix} of them shared prefix)" if prefix else "")
        if prompt >= engine.max_model_len:
            reason = f"{said} can be drawn, and vLLM refuses a prompt of max_model_len {engine.max_model_len} or more"
            self.refuse(f"{section}.prompt_tokens", reason, f"up to {engine.max_model_len - 1 - prefix} tokens")
        elif prompt + output > engine.max_model_len and isinstance(synthetic.output_tokens, FixedTokens):
            self.warnings.append(
                f"{section}.output_tokens: {said} and {output} of output pass max_model_len {engine.max_model_len}, "
                "where vLLM ends the answer"
            )
        if synthetic.conversations is not None:
            context = synthetic.conversations.max_context_tokens
            assert context is not None
            if context > engine.max_model_len:
                reason = f"is above max_model_len {engine.max_model_len}"
                self.refuse(f"{section}.conversations.max_context_tokens", reason, f"up to {engine.max_model_len}")
            elif prompt + output > context:
                reason = f"a first turn can need {prompt + output} tokens, and max_context_tokens is {context}"
                self.refuse(f"{section}.conversations", reason, "give prompt_tokens and output_tokens a max that fits")
        if (
            engine.num_gpu_blocks is not None
            and isinstance(synthetic.prompt_tokens, FixedTokens)
            and isinstance(synthetic.output_tokens, FixedTokens)
            and prefix == 0
        ):
            # The KV of the last token is never computed.
            slots = min(prompt + output - 1, engine.max_model_len)
            try:
                check_fits(engine.num_gpu_blocks, engine.block_size, slots, "every request")
            except ScenarioError as error:
                (problem,) = error.problems
                self.refuse(problem.key, problem.reason, problem.allowed)

    @staticmethod
    def _settled_lengths(synthetic: Synthetic, max_model_len: int) -> Synthetic:
        """Open ends closed: a log-normal without max, a conversation without max_context_tokens."""

        def closed(tokens: Tokens, taken: int) -> Tokens:
            if not isinstance(tokens, LognormalTokens) or tokens.max is not None:
                return tokens
            return tokens.model_copy(update={"max": max(tokens.min, max_model_len - 1 - taken)})

        prefix = 0
        update: dict[str, Any] = {}
        if synthetic.shared_prefix is not None:
            shared = closed(synthetic.shared_prefix.tokens, 1)
            update["shared_prefix"] = synthetic.shared_prefix.model_copy(update={"tokens": shared})
            try:
                prefix = workloads.lengths.largest(lengths(shared))
            except (ValueError, OverflowError):
                prefix = 0  # told where all lengths are looked at
        for key, taken in (("prompt_tokens", prefix), ("output_tokens", 0)):
            tokens = getattr(synthetic, key)
            if key not in synthetic.model_fields_set and tokens.max >= max_model_len - taken:
                tokens = tokens.model_copy(update={"max": None})  # the default, made to fit
            update[key] = closed(tokens, taken)
        if synthetic.conversations is not None:
            conversations = synthetic.conversations
            changes: dict[str, Any] = {"turns": closed(conversations.turns, 0)}
            if conversations.first_prompt_tokens is not None:
                changes["first_prompt_tokens"] = closed(conversations.first_prompt_tokens, prefix)
            if conversations.max_context_tokens is None:
                changes["max_context_tokens"] = max_model_len
            update["conversations"] = conversations.model_copy(update=changes)
        return synthetic.model_copy(update=update)

    def _events(self) -> None:
        synthetic = self.scenario.workload.synthetic
        trace = self.scenario.workload.trace
        count = None
        if synthetic is not None and synthetic.conversations is None:
            count = synthetic.num_requests
        elif trace is not None and trace.format not in ("auto", "sharegpt"):
            count = trace.max_requests
        for number, event in enumerate(self.scenario.events):
            if count is not None and isinstance(event, Abort) and event.request is not None and event.request >= count:
                self.refuse(f"events.{number}.request", f"there are {count} requests, from 0", f"0 to {count - 1}")


def _rates_from_length(length: float, k: int) -> list[float]:
    """Unconditional rates with that mean length: whole positions first, then one in part (as vLLM 0.32 does)."""
    whole, part = divmod(length - 1.0, 1.0)
    rates = [1.0] * int(whole) + [part]
    return (rates + [0.0] * k)[:k]
