"""What a scenario may say: every key, its type, its range, its default and what it means.

Knows: names and the rules inside one section. Must not know: YAML, files, or rules between sections; those are
`scenario_source` and `scenario`. The texts here are also the reference (`python -m sim.schema_docs`).

Types are strict: nothing is converted that YAML did not read as the right type. Engine settings have vLLM's names and
the defaults of vLLM 0.32 (`vllm/config/{cache,scheduler,speculative}.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from sim.models.acceptance_profiles import ACCEPTANCE_PROFILES
from sim.models.timing import TimingParams
from sim.recording import ALLOWED, Recording, RecordingError, read_recording
from workloads.fit import Points, StandIn
from workloads.profiles import PROFILES
from workloads.trace_formats import Format

__all__ = [
    "SHAREGPT_ARRIVALS",
    "SYNTHETIC_BY_DEFAULT",
    "Abort",
    "Acceptance",
    "AcceptanceClass",
    "AcceptanceProfile",
    "AllAtOnce",
    "BetaRequests",
    "Card",
    "ClosedLoop",
    "Constant",
    "Conversations",
    "Drift",
    "Engine",
    "Event",
    "ExponentialSeconds",
    "FixedTokens",
    "Gamma",
    "Geometric",
    "HiddenMarkov",
    "Jitter",
    "Limits",
    "LognormalSeconds",
    "LognormalTokens",
    "MarkovSteps",
    "MatchAndRun",
    "Mixture",
    "OnOff",
    "Output",
    "PerPosition",
    "Piecewise",
    "Poisson",
    "Policies",
    "Priority",
    "Profile",
    "QuantileTokens",
    "Replay",
    "Reset",
    "Scenario",
    "Seconds",
    "Section",
    "SharedPrefix",
    "Slo",
    "SpeculativeConfig",
    "Spelled",
    "Synthetic",
    "Tenant",
    "Timing",
    "Tokens",
    "Trace",
    "TraceColumns",
    "TraceFile",
    "Tree",
    "UniformTokens",
    "Workload",
    "checked_recording",
    "synthetic_from",
    "wrong",
]

_TIMING = TimingParams()
_MOST_TOKENS = 2**31 - 1
_LATEST_S = 1e9  # simulated time is 64-bit nanoseconds: 9.2e9 s


def wrong(reason: str, key: str = "", allowed: str = "", nearest: str | None = None) -> PydanticCustomError:
    """A rule of a section that is broken: ``key`` is the path below the section."""
    context = {"reason": reason, "key": key, "allowed": allowed, "nearest": nearest or ""}
    return PydanticCustomError("scenario", "{reason}", context)


@dataclass(frozen=True, slots=True)
class Spelled:
    """In the annotation of a key: what may be written for it, in words."""

    text: str


def checked_recording(value: object) -> bool | str:
    """A recording of steps as it is kept in a scenario: equal ones are equal. Raises PydanticCustomError."""
    try:
        return read_recording(value).written
    except RecordingError as error:
        raise wrong(str(error), "", ALLOWED, error.nearest) from None


class Section(BaseModel):
    """A mapping of the scenario: no key beyond those declared, no conversion, no NaN, no change once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Path_ = Annotated[str, Field(min_length=1, max_length=4096)]
Rate = Annotated[float, Field(ge=0, le=1)]
WholeTokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


# Numbers of tokens and the like


class FixedTokens(Section):
    """Always the same number. A bare number means this."""

    distribution: Literal["fixed"]
    tokens: WholeTokens = Field(description="The number.")


class UniformTokens(Section):
    """Each whole number from min to max, both included, alike."""

    distribution: Literal["uniform"]
    min: WholeTokens = Field(description="The smallest.")
    max: WholeTokens = Field(description="The largest.")

    @model_validator(mode="after")
    def _ordered(self) -> UniformTokens:
        if self.min > self.max:
            raise wrong(f"min {self.min} is above max {self.max}", "min", f"at most {self.max}")
        return self


class LognormalTokens(Section):
    """Log-normal, rounded, then cut off at min and max."""

    distribution: Literal["lognormal"]
    median: float = Field(gt=0, le=_MOST_TOKENS, description="The median.")
    sigma: float = Field(ge=0, le=20, description="Standard deviation of the natural logarithm.")
    min: WholeTokens = Field(default=1, description="Smaller draws become this.")
    max: WholeTokens | None = Field(
        default=None, description="Larger draws become this. null: one token less than max_model_len."
    )

    @model_validator(mode="after")
    def _ordered(self) -> LognormalTokens:
        if self.max is not None and self.min > self.max:
            raise wrong(f"min {self.min} is above max {self.max}", "min", f"at most {self.max}")
        return self


class QuantileTokens(Section):
    """Given by points of the inverse distribution function, with straight lines between them."""

    distribution: Literal["quantiles"]
    points: list[list[float]] = Field(
        min_length=2,
        max_length=10_000,
        description="Pairs [p, tokens]: p rises from 0 (the smallest number) to 1 (the largest), tokens do not fall.",
    )

    @field_validator("points")
    @classmethod
    def _rising(cls, points: list[list[float]]) -> list[list[float]]:
        shape = "pairs [p, tokens], p rising from 0 to 1, tokens from 1 up and never falling"
        for number, point in enumerate(points):
            if len(point) != 2:
                raise wrong(f"entry {number} has {len(point)} numbers", allowed=shape)
            p, tokens = point
            if not 0 <= p <= 1:
                raise wrong(f"entry {number} has p = {p:g}", allowed=shape)
            if not 1 <= tokens <= _MOST_TOKENS:
                raise wrong(f"entry {number} has {tokens:g} tokens", allowed=shape)
            if number and (p <= points[number - 1][0] or tokens < points[number - 1][1]):
                raise wrong(f"entry {number} does not rise above the one before", allowed=shape)
        if points[0][0] != 0 or points[-1][0] != 1:
            raise wrong(f"p runs from {points[0][0]:g} to {points[-1][0]:g}", allowed=shape)
        return points


def _bare_number_is_fixed(value: object) -> object:
    return {"distribution": "fixed", "tokens": value} if type(value) is int else value


Tokens = Annotated[
    Annotated[FixedTokens | UniformTokens | LognormalTokens | QuantileTokens, Field(discriminator="distribution")],
    BeforeValidator(_bare_number_is_fixed),
]


# The engine


class SpeculativeConfig(Section):
    """Speculative decoding, as vLLM's --speculative-config takes it."""

    method: Literal["ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model"] = Field(
        description="The drafter. ngram cannot run with async_scheduling (vLLM refuses it); ngram_gpu can."
    )
    model: Path_ | None = Field(
        default=None,
        description="The drafter's checkpoint. For draft_model: a name or config.json as under `model`, from which its "
        "cost and its KV are computed.",
    )
    num_speculative_tokens: int = Field(ge=1, le=1000, description="K, drafts a step.")
    num_speculative_tokens_per_batch_size: list[list[int]] | None = Field(
        default=None,
        max_length=10_000,
        description="K by batch: rows [first, last, K], the first starting at 1; a gap and the tail keep the K before; "
        "K is capped at num_speculative_tokens.",
    )
    prompt_lookup_min: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Accepted and kept, without effect: `acceptance` says what n-grams find.",
    )
    prompt_lookup_max: int | None = Field(default=None, ge=1, le=1000, description="As prompt_lookup_min.")
    draft_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Accepted and kept, without effect: 1 or tensor_parallel_size, as in vLLM.",
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        default="greedy", description="Accepted and kept, without effect: its influence is in `acceptance`."
    )
    rejection_sample_method: Literal["standard", "synthetic", "block"] = Field(
        default="standard",
        description="synthetic: the two keys below give the acceptance. standard and block: without effect, their "
        "difference is in `acceptance`.",
    )
    synthetic_acceptance_rates: list[Rate] | None = Field(
        default=None,
        max_length=1000,
        description="Unconditional rates, one a draft, never rising. Becomes `acceptance` unless that is given.",
    )
    synthetic_acceptance_length: float | None = Field(
        default=None,
        ge=1,
        le=1001,
        description="Mean accepted length with the bonus token, from 1 to K + 1; made into rates as vLLM does: full "
        "positions, then one in part.",
    )

    @model_validator(mode="after")
    def _as_vllm_checks(self) -> SpeculativeConfig:
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        if lowest is not None and highest is not None and lowest > highest:
            reason = f"prompt_lookup_min {lowest} is above prompt_lookup_max {highest}"
            raise wrong(reason, "prompt_lookup_min", f"at most {highest}")
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        k = self.num_speculative_tokens
        if self.rejection_sample_method != "synthetic":
            for key, value in (("synthetic_acceptance_rates", rates), ("synthetic_acceptance_length", length)):
                if value is not None:
                    raise wrong("only valid with rejection_sample_method: synthetic, as in vLLM", key)
            return self
        if (rates is None) == (length is None):
            raise wrong(
                "synthetic needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length",
                "rejection_sample_method",
            )
        if rates is not None and len(rates) != k:
            raise wrong(
                f"{len(rates)} rates for num_speculative_tokens {k}", "synthetic_acceptance_rates", f"{k} rates"
            )
        if rates is not None and any(later > rate for rate, later in pairwise(rates)):
            raise wrong("unconditional rates cannot rise", "synthetic_acceptance_rates", "rates that never rise")
        if length is not None and length > k + 1:
            raise wrong(f"with {k} drafts a step", "synthetic_acceptance_length", f"a number from 1 to {k + 1}")
        return self

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _rows(cls, rows: list[list[int]] | None) -> list[list[int]] | None:
        """vLLM's own checks (`validate_and_normalize_dynamic_sd_schedule`); sorts the rows as it does."""
        if rows is None:
            return None
        shape = "rows [first, last, K], from batch size 1 up, not overlapping, K >= 0"
        if not rows:
            raise wrong("is empty", allowed=shape)
        for number, row in enumerate(rows):
            if len(row) != 3:
                raise wrong(f"row {number} has {len(row)} numbers", allowed=shape)
            first, last, k = row
            if not 1 <= first <= last <= _MOST_TOKENS:
                raise wrong(f"row {number} runs from {first} to {last}", allowed=shape)
            if not 0 <= k <= 1000:
                raise wrong(f"row {number} has K = {k}", allowed=shape)
        rows = sorted(rows)
        if rows[0][0] != 1:
            raise wrong(f"the first row starts at batch size {rows[0][0]}", allowed=shape)
        for before, row in pairwise(rows):
            if row[0] <= before[1]:
                raise wrong(f"rows {before} and {row} overlap", allowed=shape)
        return rows


class Policies(Section):
    """Single axes set otherwise than the preset has them. null: as the preset. What they mean: docs/policies.md."""

    undo: Literal["overwrite", "rewind", "free_rejected", "commit_tail", "compact"] | None = Field(
        default=None,
        description="What a rejection does to blocks: overwrite (vLLM), rewind (TensorRT-LLM), free_rejected (SGLang "
        "v1), commit_tail (SGLang v2), compact (token trees).",
    )
    reservation: Literal["exact_lookahead", "worst_case", "two_frames", "max_draft"] | None = Field(
        default=None,
        description="Slots a frame is given: exact_lookahead (vLLM), worst_case (all that may come, at admission), "
        "two_frames (SGLang v2), max_draft (TensorRT-LLM).",
    )
    drafter_kv: Literal["none", "shared", "own_pool_freed", "own_pool_kept"] | None = Field(
        default=None,
        description="Where the drafter's KV lives: nowhere, in the target's blocks, or in a pool of its own that is "
        "freed "
        "after each verification or kept with the request.",
    )
    lookahead: bool | None = Field(
        default=None,
        description="Reserve K slots ahead of each frame for the KV that the drafter writes. null: as the preset, and "
        "only where that KV lives in the target's blocks. To ask what the reservation alone costs.",
    )
    drafter_pool_blocks: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Blocks of the drafter's own pool. null: as many as the target's if kept, a tenth of them if "
        "freed (a "
        "guess: the article says small).",
    )
    stale_when: Literal["reset", "any_preemption"] | None = Field(
        default=None, description="After what output in flight is discarded."
    )
    stale_how: Literal["count_frames", "count_tokens", "deliver", "drop"] | None = Field(
        default=None,
        description="count_frames: a counter set in tokens and drained in frames, which loses tokens (vLLM 0.22 to "
        "0.26). "
        "count_tokens, drop: exactly the stale frames are thrown away. deliver: none is.",
    )
    prefix_cache: Literal["accepted", "prompt_only", "prompt_and_finish"] | None = Field(
        default=None,
        description="Which blocks can be hit: accepted output too (vLLM), prompts alone (the article), prompts and at "
        "the "
        "end the rest (SGLang, TensorRT-LLM).",
    )
    last_hit: Literal["drop_block", "drop_token", "drop_nothing"] | None = Field(
        default=None, description="What a drafter that needs hidden states costs a hit."
    )
    draft_length: Literal["fixed", "adaptive", "best_by_cost"] | None = Field(
        default=None,
        description="K: fixed (or num_speculative_tokens_per_batch_size), adaptive by measured acceptance, or the K "
        "that "
        "the step-cost model says gives most tokens a second now. null: fixed.",
    )
    victim: Literal["last_admitted", "fewest_outputs"] | None = Field(
        default=None, description="Whom to preempt under fcfs when blocks are lacking."
    )
    tree_widths: list[Annotated[int, Field(ge=1, le=1000)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Drafts as a token tree: nodes of each level; num_speculative_tokens is their sum, and "
        "`acceptance` "
        "gives a rate a level. Needs undo: compact.",
    )


class Engine(Section):
    """The engine, with vLLM's names. `policy` and `num_gpu_blocks_override` are read as the names here."""

    preset: str = Field(
        default="vllm-0.32", description="Which release's rules hold; the names are in sim/policies/presets.py."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024, description="Cards that share the model.")
    dtype: Literal["bfloat16"] = Field(default="bfloat16", description="Weights and activations.")
    quantization: Literal["fp8"] | None = Field(
        default=None,
        description="fp8: the linear layers' weights and inputs, as vLLM's --quantization fp8. null: none.",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = Field(
        default="auto", description="KV cache. auto: as dtype. fp8_e4m3 is the same as fp8."
    )
    block_size: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Tokens a block: a power of two. vLLM's GPU kernels want multiples of 16; smaller: for examples.",
    )
    gpu_memory_utilization: float = Field(
        default=0.92, gt=0, le=1, description="Share of the card's memory that vLLM may use; gives num_gpu_blocks."
    )
    num_gpu_blocks: int | None = Field(
        default=None,
        ge=2,
        le=10_000_000,
        description="Blocks in the pool (vLLM's --num-gpu-blocks-override), the null block included. null: from the "
        "memory.",
    )
    # The four with None are null until `load_scenario` settles them: a loaded scenario never has it.
    max_num_seqs: int = Field(
        default=cast(int, None),
        ge=1,
        le=1_000_000,
        description="Most requests in a step. null: vLLM's default for the card (1024 from 70 GiB, but for A100; else "
        "256), at most max_num_batched_tokens.",
    )
    max_num_batched_tokens: int = Field(
        default=cast(int, None),
        ge=1,
        le=100_000_000,
        description="Most tokens in a step. null: vLLM's default for a server on the card (16384 from 160 GiB; 8192 "
        "from 70 GiB, but for A100; else 2048), at most max_num_seqs x max_model_len.",
    )
    max_model_len: int = Field(
        default=cast(int, None),
        ge=2,
        le=100_000_000,
        description="Most tokens a request may have. null: the model's max_position_embeddings.",
    )
    enable_prefix_caching: bool = Field(default=True, description="Reuse blocks of equal content.")
    watermark: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the blocks that stays free when a waiting request is admitted."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(default="fcfs", description="Who is served first.")
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, le=_MOST_TOKENS, description="Longest chunk of a prompt in a step; 0: no such limit."
    )
    async_scheduling: bool = Field(
        default=cast(bool, None),
        description="Schedule a step while the one before runs. null: as vLLM decides, true unless method is ngram. "
        "true with ngram is refused, as vLLM does.",
    )
    speculative_config: SpeculativeConfig | None = Field(default=None, description="null: no speculation.")
    policies: Policies = Field(default=Policies(), description="Axes set otherwise than in the preset.")

    @field_validator("max_num_seqs", "max_num_batched_tokens", "max_model_len", "async_scheduling", mode="wrap")
    @classmethod
    def _settled_later(cls, value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        """null stands for the default that `load_scenario` works out, so a loaded scenario never has it."""
        return None if value is None else handler(value)

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise wrong("is not a power of two", allowed="1, 2, 4, 8, 16, 32, ... 4096")
        return value

    @field_validator("kv_cache_dtype")
    @classmethod
    def _one_name(cls, value: str) -> str:
        return "fp8" if value == "fp8_e4m3" else value


class Card(Section):
    """A card by its datasheet, where `hardware` is not a known name."""

    name: str = Field(min_length=1, max_length=100, description="What to call it.")
    tflops: float = Field(gt=0, le=1e6, description="Peak dense bfloat16 arithmetic, TFLOP/s.")
    bandwidth_gb_s: float = Field(gt=0, le=1e6, description="Memory bandwidth, GB/s (1e9 bytes).")
    memory_gb: float = Field(
        gt=0, le=1e6, description="Memory, GB as datasheets count them: taken as 2**30 bytes, near what CUDA reports."
    )
    num_sms: int = Field(ge=1, le=100_000, description="Streaming multiprocessors.")


# Acceptance


class Geometric(Section):
    """Each draft is accepted with one probability, given that those before it were."""

    model: Literal["geometric"]
    rate: Rate = Field(description="The conditional probability.")


class PerPosition(Section):
    """A rate for each position of a draft."""

    model: Literal["per_position"]
    rates: list[Rate] = Field(min_length=1, max_length=1000, description="From the first draft on; at least K of them.")
    convention: Literal["conditional", "unconditional"] = Field(
        description="conditional: given that the draft before was accepted (papers, samplers). unconditional: of all "
        "steps (what vLLM prints and `synthetic_acceptance_rates` takes)."
    )

    @model_validator(mode="after")
    def _falling(self) -> PerPosition:
        if self.convention == "unconditional":
            for position, (rate, later) in enumerate(pairwise(self.rates)):
                if later > rate:
                    raise wrong(
                        f"unconditional rates cannot rise, and entry {position + 1} ({later:g}) is above the "
                        f"one before ({rate:g})",
                        "rates",
                        "rates that never rise, or convention: conditional",
                    )
        return self


class Replay(Section):
    """Recorded acceptance, walked position by position."""

    model: Literal["replay"]
    path: Path_ = Field(
        description="The file: JSON lines with tokens a step for each output position, plain or gzipped."
    )
    drafter: Annotated[str, Field(min_length=1, max_length=100)] | None = Field(
        default=None, description="Which drafter's column, where the file has several: eagle3 or ngram."
    )


class BetaRequests(Section):
    """Geometric within a request, with a rate of its own for each: Beta over requests."""

    model: Literal["beta"]
    alpha: float = Field(gt=0, le=1e9, description="Of the Beta; the mean rate is alpha / (alpha + beta).")
    beta: float = Field(gt=0, le=1e9, description="Of the Beta.")


class MarkovSteps(Section):
    """What a step accepts depends on what the step before accepted, and on the request."""

    model: Literal["markov"]
    rates: list[list[Rate]] = Field(
        min_length=2,
        max_length=101,
        description="A row for each number of drafts accepted before, 0 to K; in it K conditional rates. This K is the "
        "model's own (docs/acceptance.md).",
    )
    first: list[Rate] | None = Field(
        default=None, max_length=100, description="The rates of a request's first step. null: the average."
    )
    request_sigma: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Standard deviation of what is added, for each request, to the logit of every rate.",
    )

    @model_validator(mode="after")
    def _square(self) -> MarkovSteps:
        k = len(self.rates) - 1
        for number, row in enumerate(self.rates):
            if len(row) != k:
                raise wrong(
                    f"row {number} has {len(row)} rates and there are {k + 1} rows", "rates", f"{k} rates a row"
                )
        if self.first is not None and len(self.first) != k:
            raise wrong(f"{len(self.first)} rates for rows of {k}", "first", f"{k} rates")
        return self


class HiddenMarkov(Section):
    """A hidden state moves along output positions; a verification accepts by the state where it stands."""

    model: Literal["hidden_markov"]
    transitions: list[list[Rate]] = Field(
        min_length=1, max_length=100, description="From each state (rows) to each, from a position to the next."
    )
    rates: list[list[Rate]] = Field(
        min_length=1, max_length=100, description="Conditional rates in each state; at least K of them."
    )
    start: list[Rate] | None = Field(
        default=None, max_length=100, description="Probabilities of the first state. null: those of the long run."
    )

    @model_validator(mode="after")
    def _fitting(self) -> HiddenMarkov:
        n = len(self.transitions)
        rows = [("transitions", number, row) for number, row in enumerate(self.transitions)]
        rows += [("start", 0, self.start)] if self.start is not None else []
        for key, number, row in rows:
            if len(row) != n:
                raise wrong(f"row {number} has {len(row)} entries for {n} states", key, f"{n} entries")
            if abs(sum(row) - 1.0) > 1e-3:
                raise wrong(f"row {number} adds up to {sum(row):g}", key, "probabilities that add up to 1")
        if len(self.rates) != n:
            raise wrong(f"{len(self.rates)} rows for {n} states", "rates", f"{n} rows")
        for number, row in enumerate(self.rates):
            if not row or len(row) != len(self.rates[0]):
                raise wrong(f"row {number} has {len(row)} rates", "rates", "one or more rates, as many in each row")
        return self


class MatchAndRun(Section):
    """N-gram drafting: a match is found or not, in bursts, and then runs on; without a match there is no draft."""

    model: Literal["match_and_run"]
    start: Rate = Field(description="Probability that a match begins at an output position after one without.")
    again: Rate = Field(description="The same where a match has just ended.")
    rates: list[Rate] = Field(
        min_length=1,
        max_length=1000,
        description="Conditional rates along a match, the last for all that follows; a step does not start them anew.",
    )


class Drift(Section):
    """One rate that changes along the request."""

    model: Literal["drift"]
    rate: float = Field(gt=0, lt=1, description="The conditional rate at the first token.")
    slope: float = Field(ge=-20, le=20, description="logit(rate at position p) = logit(rate) + slope x ln(1 + p / 64).")


class Tree(Section):
    """A tree of drafts by level, as the depth that is accepted."""

    model: Literal["tree"]
    rates: list[Rate] = Field(
        min_length=1, max_length=1000, description="Of a single candidate at each level; at least K levels."
    )
    widths: list[Annotated[int, Field(ge=1, le=10_000)]] = Field(
        min_length=1,
        max_length=1000,
        description="Candidates of a node at each level, accepted independently: a level is passed with "
        "1 - (1 - rate)^width. The rows that a tree costs are not simulated.",
    )

    @model_validator(mode="after")
    def _levels(self) -> Tree:
        if len(self.widths) != len(self.rates):
            raise wrong(f"{len(self.widths)} widths for {len(self.rates)} rates", "widths", "one a level")
        return self


class AcceptanceProfile(Section):
    """Figures that somebody published, by name; `speckv acceptance profiles` lists them."""

    model: Literal["profile"]
    name: str = Field(description="Its name.")

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ACCEPTANCE_PROFILES:
            raise wrong("is not known", allowed=", ".join(ACCEPTANCE_PROFILES))
        return value


class AcceptanceClass(Section):
    """One class of requests."""

    weight: float = Field(ge=0, le=1e9, description="Its share of the requests, in proportion.")
    acceptance: Annotated[
        Geometric | PerPosition | BetaRequests | MarkovSteps | HiddenMarkov | MatchAndRun | Drift | Tree,
        Field(discriminator="model"),
    ] = Field(description="What its requests accept.")


class Mixture(Section):
    """Classes of requests; which one a request is of is drawn."""

    model: Literal["mixture"]
    classes: list[AcceptanceClass] = Field(min_length=1, max_length=100, description="The classes.")

    @model_validator(mode="after")
    def _some(self) -> Mixture:
        if not sum(entry.weight for entry in self.classes) > 0:
            raise wrong("no weight is above 0", "classes", "some weight above 0")
        return self


Acceptance = Annotated[
    Geometric
    | PerPosition
    | Replay
    | BetaRequests
    | MarkovSteps
    | HiddenMarkov
    | MatchAndRun
    | Drift
    | Tree
    | Mixture
    | AcceptanceProfile,
    Field(discriminator="model"),
]


# Times


class Jitter(Section):
    """Each step's time times a random factor with median 1, and rare stalls; drawn by step, from a stream of its
    own."""

    model: Literal["lognormal", "residuals"] = Field(
        default="lognormal",
        description="lognormal: by sigma. residuals: drawn from what the calibration missed on held-out measurements.",
    )
    sigma: float = Field(
        default=0.03, ge=0, le=2, description="Standard deviation of the factor's logarithm, for lognormal. A guess."
    )
    stalls_per_1000_steps: float = Field(default=0.0, ge=0, le=1000, description="How often a step stalls on average.")
    stall_ms: float = Field(default=0.0, ge=0, le=1e6, description="What a stall adds.")


class Timing(Section):
    """What a step costs besides arithmetic and memory; where the defaults come from stands in sim/models/timing.py."""

    schedule_ms: float = Field(
        default=0.2,
        ge=0,
        le=1e6,
        description="Host time to schedule a step; hidden behind the step before where scheduling is asynchronous. The "
        "default is a guess.",
    )
    update_ms: float = Field(
        default=0.3, ge=0, le=1e6, description="Host time to take a step's results back. The default is a guess."
    )
    calibration: Path_ | None = Field(
        default=None,
        description="What the card's kernels reach: a name of scenarios/calibrations, or a YAML file as `speckv "
        "calibrate "
        "fit` writes it. null: the card's own; where it has none, the H100's shares on its datasheet.",
    )
    attention_kernel: Literal["fa2", "fa3", "flashinfer"] | None = Field(
        default=None,
        description="fa2 (FlashAttention 2) does not split KV where a request has several query tokens, fa3 and "
        "flashinfer "
        "do. null: the card's.",
    )
    per_layer_us: float | None = Field(
        default=_TIMING.per_layer_us, ge=0, le=1e9, description="Overhead a layer. null: the calibration's."
    )
    per_step_us: float | None = Field(
        default=_TIMING.per_step_us,
        ge=0,
        le=1e9,
        description="Overhead a step that the device waits for. null: the calibration's.",
    )
    per_sampled_token_us: float | None = Field(
        default=_TIMING.per_sampled_token_us,
        ge=0,
        le=1e9,
        description="Overhead a sampled or verified token. null: the calibration's.",
    )
    draft_step_us: float | None = Field(
        default=_TIMING.draft_step_us,
        ge=0,
        le=1e9,
        description="One forward of the drafter. null: computed from its shape.",
    )
    draft_round_us: float = Field(
        default=_TIMING.draft_round_us, ge=0, le=1e9, description="Overhead a round of drafting, but for n-grams."
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Small steps replay captured graphs, padded to their sizes; false: every step is eager.",
    )
    fixed_step_ms: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Every step takes exactly this on the device, whatever is in it, and keys in us have no effect. "
        "For teaching, and for checks against queueing formulas (with schedule_ms and update_ms 0).",
    )
    jitter: Jitter | None = Field(
        default=None, description="Random step times. null: a step costs what the model says."
    )


# Workload


class Poisson(Section):
    """Independent arrivals: exponential gaps."""

    process: Literal["poisson"]
    rate: float = Field(gt=0, le=1e6, description="Requests a second.")


class Gamma(Section):
    """Gamma gaps, as vllm bench serve --burstiness."""

    process: Literal["gamma"]
    rate: float = Field(gt=0, le=1e6, description="Requests a second.")
    burstiness: float = Field(
        ge=0.001, le=1e6, description="Shape: 1 is Poisson, below 1 comes in bursts, above 1 is more even."
    )


class Constant(Section):
    """Even gaps, the first at 0."""

    process: Literal["constant"]
    rate: float = Field(gt=0, le=1e6, description="Requests a second.")


class OnOff(Section):
    """Bursts: one rate while on, another while off, beginning on; Poisson within each."""

    process: Literal["on_off"]
    on_rate: float = Field(gt=0, le=1e6, description="Requests a second while on.")
    off_rate: float = Field(default=0.0, ge=0, le=1e6, description="Requests a second while off.")
    on_s: float = Field(gt=0, le=1e6, description="How long it is on, on average.")
    off_s: float = Field(gt=0, le=1e6, description="How long it is off, on average.")
    regular: bool = Field(
        default=False,
        description="true: each phase lasts exactly so long. false: exponential times (Markov-modulated Poisson).",
    )


class Piecewise(Section):
    """A rate that changes by a table; Poisson at each time."""

    process: Literal["piecewise"]
    rates: list[list[float]] = Field(
        min_length=1,
        max_length=100_000,
        description="Rows [from_s, requests a second]: from_s rises from 0; each rate holds until the next row.",
    )
    repeat_s: float | None = Field(
        default=None, gt=0, le=_LATEST_S, description="When the table begins anew. null: the last rate holds for ever."
    )

    @model_validator(mode="after")
    def _rising(self) -> Piecewise:
        shape = "rows [from_s, rate], from_s rising from 0, rates from 0 to 1e6 and one above 0"
        before = -1.0
        for number, row in enumerate(self.rates):
            if len(row) != 2:
                raise wrong(f"row {number} has {len(row)} numbers", "rates", shape)
            if row[0] <= before or (number == 0) != (row[0] == 0):
                raise wrong(f"row {number} is from {row[0]:g} s on", "rates", shape)
            if not 0 <= row[1] <= 1e6:
                raise wrong(f"row {number} has the rate {row[1]:g}", "rates", shape)
            before = row[0]
        if not any(rate > 0 for _, rate in self.rates):
            raise wrong("no rate is above 0", "rates", shape)
        if self.repeat_s is None and self.rates[-1][1] == 0:
            raise wrong(
                "the last rate is 0, so the requests would never end", "rates", "a last rate above 0, or repeat_s"
            )
        if self.repeat_s is not None and self.repeat_s <= before:
            raise wrong(f"the last row is from {before:g} s on", "repeat_s", f"above {before:g}")
        return self


class AllAtOnce(Section):
    """Everything at time 0."""

    process: Literal["all_at_once"]


class ClosedLoop(Section):
    """A number of users; each sends the next request when the last has ended."""

    process: Literal["closed_loop"]
    concurrency: int = Field(ge=1, le=1_000_000, description="Requests (or conversations) under way at a time.")


Arrivals = Annotated[
    Poisson | Gamma | Constant | OnOff | Piecewise | AllAtOnce | ClosedLoop, Field(discriminator="process")
]


class ExponentialSeconds(Section):
    """Exponential, rounded to milliseconds, at least one."""

    distribution: Literal["exponential"]
    mean: float = Field(gt=0, le=1e6, description="The mean.")


class LognormalSeconds(Section):
    """Log-normal, rounded to milliseconds, at least one, then cut off at max."""

    distribution: Literal["lognormal"]
    median: float = Field(gt=0, le=1e6, description="The median.")
    sigma: float = Field(ge=0, le=20, description="Standard deviation of the natural logarithm.")
    max: float = Field(default=86_400.0, gt=0, le=1e6, description="Larger draws become this.")


def _kind_of_seconds(value: object) -> str:
    kind = value.get("distribution") if isinstance(value, dict) else getattr(value, "distribution", None)
    if kind == "exponential":
        return "exponential"
    return "lognormal" if kind is not None or isinstance(value, dict) else "(number)"


Seconds = Annotated[
    Annotated[float, Field(ge=0, le=1e6), Tag("(number)")]
    | Annotated[ExponentialSeconds, Tag("exponential")]
    | Annotated[LognormalSeconds, Tag("lognormal")],
    Discriminator(_kind_of_seconds),
]


class SharedPrefix(Section):
    """System prompts that many requests begin with, on top of their own prompt_tokens."""

    count: int = Field(default=1, ge=1, le=1_000_000, description="Different prefixes.")
    tokens: Tokens = Field(description="Length of each.")
    fraction: Rate = Field(default=1.0, description="Share of the requests that begin with one.")


class Conversations(Section):
    """Conversations: each turn's prompt repeats all that was said before. Then num_requests counts conversations."""

    turns: Tokens = Field(description="Turns of a conversation.")
    first_prompt_tokens: Tokens | None = Field(
        default=None,
        description="New tokens of the first turn, where it differs: an agent's task, before its tools' results. null: "
        "prompt_tokens.",
    )
    think_time_s: Seconds = Field(
        default=0.0, description="From the end of an answer to the next turn: a user's thought, or a tool's run."
    )
    max_context_tokens: int | None = Field(
        default=None,
        ge=2,
        le=_MOST_TOKENS,
        description="A conversation ends before the turn that would not fit. null: max_model_len.",
    )


class Priority(Section):
    """Priorities drawn for the requests; lower is served first. A bare number gives it to all."""

    levels: list[Annotated[int, Field(ge=-(2**31), le=_MOST_TOKENS)]] = Field(
        min_length=1, max_length=1000, description="The priorities there are."
    )
    weights: list[Annotated[float, Field(ge=0, le=1e9)]] | None = Field(
        default=None, max_length=1000, description="How often each comes, in proportion. null: all alike."
    )

    @model_validator(mode="after")
    def _matching(self) -> Priority:
        if self.weights is not None:
            if len(self.weights) != len(self.levels):
                reason = f"{len(self.weights)} weights for {len(self.levels)} levels"
                raise wrong(reason, "weights", "one weight a level")
            if not sum(self.weights) > 0:
                raise wrong("no weight is above 0", "weights", "one weight a level, some above 0")
        return self


def _bare_number_is_level(value: object) -> object:
    return {"levels": [value]} if type(value) is int else value


class TraceColumns(Section):
    """What the columns of a CSV, JSON lines or Parquet file are called, for format: columns."""

    arrival: str = Field(min_length=1, max_length=200, description="Time of arrival.")
    prompt_tokens: str = Field(min_length=1, max_length=200, description="Tokens of the prompt.")
    output_tokens: str = Field(min_length=1, max_length=200, description="Tokens of the output.")
    unit: Literal["s", "ms", "us", "ns", "iso"] = Field(
        default="s", description="Of the arrivals; iso: YYYY-MM-DD hh:mm:ss, perhaps with decimals and a zone."
    )

    @model_validator(mode="after")
    def _different(self) -> TraceColumns:
        if len({self.arrival, self.prompt_tokens, self.output_tokens}) < 3:
            raise wrong("two columns have the same name", allowed="three different names")
        return self


class TraceFile(Section):
    """A recorded trace to take the lengths of."""

    path: Path_ = Field(description="The file, looked for beside the scenario and then in the working directory.")
    format: Literal["auto", Format] = Field(
        default="auto", description="What each is stands in docs/workloads.md. auto: by the content."
    )
    columns: TraceColumns | None = Field(
        default=None,
        description="For format: columns. null: arrival_s (or _ms, _us, _ns), prompt_tokens and output_tokens.",
    )
    max_requests: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Only the first so many; with sharegpt, so many conversations. null: all.",
    )
    skip_bad_rows: bool = Field(
        default=False, description="Leave out rows that cannot be used, and count them in a warning; false: refuse."
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="For sharegpt: an encoding of tiktoken, or what AutoTokenizer of transformers takes. null: a token "
        "for each four bytes.",
    )


class Synthetic(Section):
    """Requests drawn from distributions."""

    num_requests: int = Field(
        default=100, ge=1, le=10_000_000, description="How many; with `conversations`, how many conversations."
    )
    arrivals: Arrivals = Field(default=Poisson(process="poisson", rate=4.0), description="When they come.")
    prompt_tokens: Tokens = Field(
        default=LognormalTokens(distribution="lognormal", median=190, sigma=1.1, max=4096),
        description="Tokens of its own in a prompt; with `conversations`, new tokens of each turn. The default is near "
        "the ShareGPT requests of SpecDecode-Bench, and is cut to fit max_model_len.",
    )
    output_tokens: Tokens = Field(
        default=LognormalTokens(distribution="lognormal", median=460, sigma=1.0, max=4096),
        description="Tokens of an answer. The default as for prompt_tokens.",
    )
    length_correlation: float = Field(
        default=0.0,
        ge=-1,
        le=1,
        description="Spearman's rank correlation of prompt_tokens and output_tokens (a Gaussian copula).",
    )
    lengths_from: TraceFile | None = Field(
        default=None,
        description="Draw (prompt, output) in pairs from a trace, with replacement; prompt_tokens and output_tokens "
        "then have no effect. null: no.",
    )
    shared_prefix: SharedPrefix | None = Field(default=None, description="null: none.")
    conversations: Conversations | None = Field(default=None, description="null: every request stands alone.")
    priority: Annotated[Priority, BeforeValidator(_bare_number_is_level)] | None = Field(
        default=None, description="Only with scheduling_policy: priority. null: 0 for all."
    )

    @model_validator(mode="after")
    def _pairs_stand_alone(self) -> Synthetic:
        for key in ("length_correlation", "lengths_from"):
            if getattr(self, key) and self.conversations is not None:
                raise wrong("pairs lengths of single requests, and has no meaning with conversations", key)
        if self.lengths_from is not None and self.length_correlation:
            raise wrong("lengths_from brings the correlation of the trace", "length_correlation")
        return self


class Trace(TraceFile):
    """Requests of a recorded trace."""

    time_scale: float = Field(
        default=1.0, gt=0, le=1e6, description="How much faster the trace is played: 2 is twice the load."
    )
    block_tokens: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_TOKENS,
        description="Tokens that a block of the trace stands for. null: 512 for mooncake, 16 for llmservingsim.",
    )
    arrivals: Arrivals | None = Field(
        default=None,
        description="Only for sharegpt, which has no times: when conversations begin. null: poisson with rate 4, and a "
        "warning.",
    )
    think_time_s: Seconds = Field(
        default=0.0, description="Only for sharegpt: from the end of an answer to the next turn."
    )


class Profile(Section):
    """A shipped profile: a generator fitted to a public trace; sources in docs/workloads.md."""

    name: Literal["azure-2023-conv", "azure-2023-code", "mooncake-conversation", "sharegpt"] = Field(
        description="Which trace it stands in for."
    )
    num_requests: int | None = Field(
        default=None, ge=1, le=10_000_000, description="How many. null: as many as the trace had."
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Requests a second over all, bursts in proportion. null: the trace's; sharegpt has none and needs "
        "one.",
    )

    @model_validator(mode="after")
    def _has_a_rate(self) -> Profile:
        if self.rate is None and PROFILES[self.name].stand_in.rate_per_s is None:
            raise wrong("is needed: the trace has no arrival times", "rate", "requests a second")
        return self

    def as_synthetic(self) -> Synthetic:
        """The same, spelled out."""
        return synthetic_from(PROFILES[self.name].stand_in, self.num_requests, self.rate)


def synthetic_from(stand_in: StandIn, num_requests: int | None = None, rate: float | None = None) -> Synthetic:
    """A fitted generator as a section of a scenario; `rate` (requests a second) instead of the trace's, or of 4."""

    def tokens(points: Points) -> QuantileTokens:
        return QuantileTokens(distribution="quantiles", points=[[p, float(value)] for p, value in points])

    settled = rate or stand_in.rate_per_s or 4.0
    arrivals: Arrivals = Poisson(process="poisson", rate=settled)
    if stand_in.rates:
        faster = settled / (stand_in.rate_per_s or settled)
        rows = [[from_s, each * faster] for from_s, each in stand_in.rates]
        arrivals = Piecewise(process="piecewise", rates=rows, repeat_s=stand_in.repeat_s)
    elif stand_in.burstiness != 1.0:
        arrivals = Gamma(process="gamma", rate=settled, burstiness=stand_in.burstiness)
    shared = stand_in.shared
    return Synthetic(
        num_requests=num_requests or stand_in.num_requests,
        arrivals=arrivals,
        prompt_tokens=tokens(stand_in.prompt),
        output_tokens=tokens(stand_in.output),
        length_correlation=stand_in.rank_correlation if stand_in.turns is None else 0.0,
        shared_prefix=None
        if shared is None
        else SharedPrefix(count=shared.count, tokens=tokens(shared.tokens), fraction=shared.fraction),
        conversations=None if stand_in.turns is None else Conversations(turns=tokens(stand_in.turns)),
    )


class Tenant(Section):
    """One of several that share the server: its own requests, arrivals and prefixes, drawn apart from the others'."""

    name: str = Field(
        max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="What to call it; letters, digits and ._-."
    )
    synthetic: Synthetic | None = Field(default=None, description="What it asks; this or profile.")
    profile: Profile | None = Field(default=None, description="What it asks; this or synthetic.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Tenant:
        if (self.synthetic is None) == (self.profile is None):
            given = "both are given" if self.synthetic is not None else "neither is given"
            raise wrong(f"needs exactly one of synthetic and profile, and {given}", allowed="synthetic or profile")
        return self


class Workload(Section):
    """What is asked of the engine: exactly one of these."""

    trace: Trace | None = Field(default=None, description="A recorded trace.")
    synthetic: Synthetic | None = Field(default=None, description="Drawn from distributions.")
    profile: Profile | None = Field(
        default=None, description="A shipped profile; a run's settings show it spelled out as `synthetic`."
    )
    tenants: list[Tenant] | None = Field(
        default=None, min_length=1, max_length=1000, description="Several at once, merged in order of time."
    )
    refuse_too_long: bool = Field(
        default=False,
        description="true: requests that the engine can never serve (a prompt of max_model_len or more, or more than "
        "the pool holds) are turned away one by one, as a server does, and counted as num_refused. false: the scenario "
        "is refused.",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Workload:
        kinds = ("trace", "synthetic", "profile", "tenants")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            said = "neither is given" if not given else f"both are given: {' and '.join(given)}"
            reason = f"needs exactly one of trace and synthetic, or profile or tenants, and {said}"
            out = "synthetic" if "synthetic" in given else given[-1] if given else None
            taken_out = "" if out is None else f" (--set workload.{out}=null takes {out} out)"
            raise wrong(reason, allowed=f"trace, synthetic, profile or tenants{taken_out}")
        names = [tenant.name for tenant in self.tenants or ()]
        if len(set(names)) < len(names):
            raise wrong("two tenants have the same name", "tenants", "different names")
        return self


SYNTHETIC_BY_DEFAULT = Workload(synthetic=Synthetic())
SHAREGPT_ARRIVALS = Poisson(process="poisson", rate=4.0)
"""When recorded conversations begin where nobody says."""


# Events


class Reset(Section):
    """vLLM's reset_prefix_cache."""

    type: Literal["reset_prefix_cache"]
    reset_running_requests: bool = Field(
        default=False,
        description="Preempt all running requests first; without it nothing happens while blocks are held.",
    )
    at_s: float | None = Field(default=None, ge=0, le=_LATEST_S, description="Once, at this time.")
    every_s: float | None = Field(
        default=None, ge=0.001, le=_LATEST_S, description="Again and again, first after this time."
    )
    rate_per_s: float | None = Field(
        default=None, gt=0, le=1000, description="At random, so often a second on average."
    )

    @model_validator(mode="after")
    def _one_time(self) -> Reset:
        given = [key for key in ("at_s", "every_s", "rate_per_s") if getattr(self, key) is not None]
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            raise wrong(f"needs exactly one of at_s, every_s and rate_per_s, and has {said}", allowed="one of them")
        return self


class Abort(Section):
    """A client that hangs up: one request at a time of its own, or random running ones at a rate."""

    type: Literal["abort"]
    request: int | None = Field(default=None, ge=0, le=100_000_000, description="Its number, from 0.")
    at_s: float | None = Field(default=None, ge=0, le=_LATEST_S, description="When `request` is aborted.")
    rate_per_s: float | None = Field(
        default=None, gt=0, le=1000, description="So many random running requests a second on average."
    )

    @model_validator(mode="after")
    def _one_way(self) -> Abort:
        if self.rate_per_s is not None and (self.request is not None or self.at_s is not None):
            raise wrong("rate_per_s aborts random requests, so it goes without request and at_s", "rate_per_s")
        if self.rate_per_s is None and (self.request is None or self.at_s is None):
            raise wrong("needs request and at_s, or rate_per_s alone", allowed="request with at_s, or rate_per_s")
        return self


Event = Annotated[Reset | Abort, Field(discriminator="type")]


# The rest


class Slo(Section):
    """Limits that a request must keep to count for goodput, as vllm bench serve --goodput. null: no limit."""

    ttft_ms: float | None = Field(default=None, gt=0, le=1e12, description="Time to the first token.")
    tpot_ms: float | None = Field(default=None, gt=0, le=1e12, description="Mean time a token after the first.")
    e2el_ms: float | None = Field(default=None, gt=0, le=1e12, description="From arrival to the last token.")


class Output(Section):
    """What a run leaves behind."""

    format: Literal["parquet", "csv"] = Field(default="parquet", description="Of the tables.")
    steps: Annotated[bool | str, Spelled(ALLOWED)] = Field(
        default=True,
        description="Rows of the table of steps: each step's, the first step's and each Nth from there on, or one a "
        "window of simulated time (`docs/results.md`).",
    )
    pictures: bool = Field(default=True, description="Draw the pictures.")
    distributions: bool = Field(
        default=False,
        description="Follow garbage slot by slot: `garbage` in the summary, and the room of each request. Costs "
        "two to three times what the ledger does.",
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _recording(cls, value: object) -> bool | str:
        return checked_recording(value)

    @property
    def recording(self) -> Recording:
        """What `steps` says."""
        return read_recording(self.steps)


class Limits(Section):
    """Where a run stops at the latest. null: when every request is done."""

    max_time_s: float | None = Field(default=None, gt=0, le=_LATEST_S, description="Simulated seconds.")
    max_steps: int | None = Field(default=None, ge=1, le=10**12, description="Steps of the engine.")


def _kind_of_hardware(value: object) -> str:
    return "(name)" if isinstance(value, str) else "(card)"


class Scenario(Section):
    """A whole scenario, read and checked. Every key may be left out."""

    name: str = Field(
        default="",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Letters, digits and ._- only; names the results. Default: the file's name.",
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Of everything drawn.")
    model: Path_ = Field(
        default="llama-3.1-8b", description="A name that sim/models/shapes.py knows, or a Hugging Face config.json."
    )
    hardware: Annotated[
        Annotated[str, Field(min_length=1, max_length=100), Tag("(name)")] | Annotated[Card, Tag("(card)")],
        Discriminator(_kind_of_hardware),
    ] = Field(default="h100", description="A name that sim/models/hardware.py knows, or a card by its datasheet.")
    engine: Engine = Field(default=Engine(), description="The engine's settings.")
    acceptance: Acceptance | None = Field(
        default=None,
        description="Which drafts are accepted. null: `synthetic_acceptance_*` if given, else geometric with a "
        "rate for the method. Without speculation it has no effect.",
    )
    timing: Timing = Field(default=Timing(), description="Constants of the step's cost.")
    workload: Workload = Field(
        default=SYNTHETIC_BY_DEFAULT, description="What is asked. Default: `synthetic` with its defaults."
    )
    events: list[Event] = Field(default=[], max_length=10_000, description="What happens from outside.")
    slo: Slo = Field(default=Slo(), description="Limits for goodput.")
    output: Output = Field(default=Output(), description="What is written.")
    limits: Limits = Field(default=Limits(), description="Where to stop.")

    _file: Path | None = PrivateAttr(default=None)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def file(self) -> Path | None:
        """The file it was read from."""
        return self._file

    @property
    def warnings(self) -> tuple[str, ...]:
        """What can be run, but is probably not meant, or would be refused by vLLM."""
        return self._warnings

    def resolved(self) -> dict[str, Any]:
        """Every setting with its default filled in, JSON-able, always in the same order; itself a scenario."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 of `resolved`, 64 hexadecimal digits. Files that it names (traces, replays) are not read for it."""
        text = json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("ascii")).hexdigest()
