"""How many drafts a verification accepts: a pure function of (seed, request, output position).

Knows rates and recorded lengths. Must not know requests, steps, K or policies: a run says how far acceptance would go,
and a frame with d drafts accepts min(run, d). So two runs that differ in K or in policy share their luck, and a
preemption shifts nothing.

Two conventions of a rate at draft i (from 1): unconditional, the share of verifications that accept i drafts or more
(what vLLM prints); conditional, the share of those that accepted i - 1 which also accept draft i (samplers and papers).
A mean acceptance length counts the bonus token: 1 + the sum of the unconditional rates.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from workloads.streams import uniform_rows, uniforms

__all__ = [
    "AcceptanceError",
    "AcceptanceModel",
    "BulkAcceptance",
    "Geometric",
    "PerPosition",
    "Replay",
    "read_accepted_lengths",
]

PURPOSE: Final = "acceptance"


class AcceptanceError(ValueError):
    """A rate or a recording that is not one; the text names the file and line or the parameter, and what is allowed."""


class AcceptanceModel(Protocol):
    """What a run of drafts is drawn from. `k` is a number of drafts, 0 or more."""

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """Entry j of `count`: the drafts accepted by a verification whose first draft stands at output position
        first + j of the request, before the cap by the number of drafts."""
        ...

    def unconditional_rates(self, k: int) -> list[float]:
        """Share of verifications with k drafts that accept 1, 2, ..., k or more."""
        ...

    def conditional_rates(self, k: int) -> list[float]:
        """Of the verifications that accepted every draft before, the share that accepts draft 1, ..., k; 0 for none."""
        ...

    def mean_acceptance_length(self, k: int) -> float:
        """Tokens a verification with k drafts yields on average, the bonus token included."""
        ...


class BulkAcceptance(Protocol):
    """A model whose requests do not differ, so that many can be drawn at once."""

    def rows(self, first_request: int, requests: int, count: int) -> NDArray[np.integer[Any]]:
        """Row i is `runs(first_request + i, 0, count)`, in whatever whole numbers are wide enough."""
        ...


class _Thresholds:
    """One uniform a verification against a table: accepted = the number of unconditional rates above it."""

    def __init__(self, seed: int, unconditional: Sequence[float]) -> None:
        self.seed = seed
        self._unconditional = list(unconditional)
        self._rates = np.array(self._unconditional, dtype=np.float64)

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        return self._above(uniforms(self.seed, PURPOSE, request, first, count)).astype(np.int64)

    def rows(self, first_request: int, requests: int, count: int) -> NDArray[np.integer[Any]]:
        """See BulkAcceptance."""
        return self._above(uniform_rows(self.seed, PURPOSE, first_request, requests, count))

    def _above(self, draws: NDArray[np.float64]) -> NDArray[np.integer[Any]]:
        """Rates above each draw. They fall, so that one that is above no draw ends it; cheaper than to search."""
        above: NDArray[np.integer[Any]] = np.zeros(draws.shape, np.uint8 if len(self._rates) < 256 else np.int64)
        for rate in self._rates:
            under = draws < rate
            if not under.any():
                break
            above += under.view(np.uint8)
        return above

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        rates = self._unconditional[:k]
        return rates + [0.0] * (k - len(rates))

    def conditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        return _conditional(self.unconditional_rates(k))

    def mean_acceptance_length(self, k: int) -> float:
        """See AcceptanceModel."""
        return 1.0 + sum(self.unconditional_rates(k))


class Geometric(_Thresholds):
    """Every draft is accepted with the same conditional rate, independently: a run is geometric, cut at `max_run`.

    With K drafts a verification yields (1 - rate^(K + 1)) / (1 - rate) tokens on average (Leviathan, Kalman, Matias,
    "Fast inference from transformers via speculative decoding", 2023). `rate` in [0, 1], `max_run` above 0; raises
    AcceptanceError otherwise.
    """

    def __init__(self, seed: int, rate: float, max_run: int = 64) -> None:
        _check_rate("rate", rate)
        if max_run < 1:
            raise AcceptanceError(f"max_run: must be above 0, got {max_run!r}")
        self.rate = float(rate)
        self.max_run = max_run
        super().__init__(seed, [self.rate**i for i in range(1, max_run + 1)])


class PerPosition(_Thresholds):
    """A rate for each draft of a verification; beyond the last one nothing is accepted.

    `convention` says what `rates` are; unconditional ones must not increase. Raises AcceptanceError for an empty list,
    a rate outside [0, 1], or unconditional rates that increase.
    """

    def __init__(
        self, seed: int, rates: Sequence[float], convention: Literal["conditional", "unconditional"] = "conditional"
    ) -> None:
        if convention not in ("conditional", "unconditional"):
            raise AcceptanceError(f"convention: must be conditional or unconditional, got {convention!r}")
        if not rates:
            raise AcceptanceError("rates: must not be empty")
        for number, rate in enumerate(rates):
            _check_rate(f"rates[{number}]", rate)
        if convention == "unconditional":
            for number, (before, after) in enumerate(pairwise(rates), start=1):
                if after > before:
                    raise AcceptanceError(
                        f"rates[{number}] = {after!r}: unconditional rates must not increase (before it: {before!r})"
                    )
            unconditional = [float(rate) for rate in rates]
        else:
            unconditional = np.cumprod(np.asarray(rates, dtype=np.float64)).tolist()
        self.max_run = len(rates)
        super().__init__(seed, unconditional)


class Replay:
    """Recorded acceptance: sequence i mod n answers for request i, by output position; used up, it starts again.

    An entry is an accepted length: the tokens that a verification at that output position yields, the bonus token
    included, so 1 or more. The rates are those of walking every sequence once with k drafts, p += min(length, k + 1).
    Raises AcceptanceError where there is no sequence, an empty one, or a length below 1.
    """

    def __init__(self, sequences: Sequence[Sequence[int] | NDArray[np.int64]]) -> None:
        if not sequences:
            raise AcceptanceError("sequences: must not be empty")
        self._runs: list[NDArray[np.int64]] = []
        for number, sequence in enumerate(sequences):
            lengths = np.asarray(sequence)
            if lengths.ndim != 1 or lengths.size == 0 or lengths.dtype.kind not in "iu":
                raise AcceptanceError(f"sequences[{number}]: must be a list of whole numbers, not empty")
            if int(lengths.min()) < 1:
                place = int(np.argmin(lengths))
                raise AcceptanceError(
                    f"sequences[{number}][{place}] = {lengths[place]}: an accepted length is 1 or more"
                )
            self._runs.append(lengths.astype(np.int64) - 1)
        self.max_run = max(int(run.max()) for run in self._runs)

    def runs(self, request: int, first: int, count: int) -> NDArray[np.int64]:
        """See AcceptanceModel."""
        recorded = self._runs[request % len(self._runs)]
        return recorded[np.arange(first, first + count) % recorded.size]

    def unconditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        steps = 0
        accepted = [0] * (k + 1)  # verifications by drafts accepted
        for recorded in self._runs:
            position = 0
            capped = np.minimum(recorded, k).tolist()
            while position < len(capped):
                accepted[capped[position]] += 1
                position += capped[position] + 1
                steps += 1
        return [sum(accepted[i:]) / steps for i in range(1, k + 1)]

    def conditional_rates(self, k: int) -> list[float]:
        """See AcceptanceModel."""
        return _conditional(self.unconditional_rates(k))

    def mean_acceptance_length(self, k: int) -> float:
        """See AcceptanceModel."""
        return 1.0 + sum(self.unconditional_rates(k))


def read_accepted_lengths(path: str | os.PathLike[str], field: str = "eagle3_tokens_per_step") -> list[list[int]]:
    """Accepted lengths by request and output position, for Replay.

    A `.jsonl` file has a request a line: an object whose `field` is the list (SpecDecode-Bench's recordings), or the
    list itself. A `.json` file is one list of lists. Either may end in `.gz`. Raises AcceptanceError with the line of a
    `.jsonl` file, or the place in the list, and what is wrong.
    """
    file = Path(path)
    name = file.name.lower().removesuffix(".gz")
    if not name.endswith((".jsonl", ".json")):
        raise AcceptanceError(f"{file}: must end in .jsonl, .jsonl.gz, .json or .json.gz")
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.name.lower().endswith(".gz") else content).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AcceptanceError(f"{file}: not a text file") from None
    except (OSError, EOFError, zlib.error) as error:  # the last two for a damaged archive
        raise AcceptanceError(f"{file}: cannot be read ({error})") from None
    if name.endswith(".jsonl"):
        lines = ((f"{file}:{number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
        sequences = [_line(place, line, field) for place, line in lines]
    else:
        document = _parsed(str(file), text)
        if not isinstance(document, list):
            raise AcceptanceError(f"{file}: expected a list of lists of accepted lengths")
        sequences = [_lengths(f"{file}: entry {number}", entry) for number, entry in enumerate(document)]
    if not sequences:
        raise AcceptanceError(f"{file}: holds no sequence")
    return sequences


def _line(place: str, text: str, field: str) -> list[int]:
    entry = _parsed(place, text)
    if isinstance(entry, dict):
        if field not in entry:
            shown = ", ".join(sorted(entry)) or "none"
            raise AcceptanceError(f"{place}: {field}: missing; fields here: {shown}")
        return _lengths(f"{place}: {field}", entry[field])
    return _lengths(place, entry)


def _parsed(place: str, text: str) -> object:
    try:
        parsed: object = json.loads(text)
    except json.JSONDecodeError as error:
        line = "" if error.lineno == 1 else f" at line {error.lineno}"
        raise AcceptanceError(f"{place}: malformed JSON{line} ({error.msg})") from None
    except (RecursionError, ValueError):
        raise AcceptanceError(f"{place}: malformed JSON") from None
    return parsed


def _lengths(place: str, entry: object) -> list[int]:
    if not isinstance(entry, list) or not entry:
        raise AcceptanceError(f"{place}: expected a list of accepted lengths, not empty")
    for number, length in enumerate(entry):
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length < 1 << 31:
            raise AcceptanceError(f"{place}[{number}] = {length!r}: expected a whole number, 1 or more")
    return entry


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise AcceptanceError(f"{name} = {rate!r}: must be between 0 and 1")


def _conditional(unconditional: Sequence[float]) -> list[float]:
    before = [1.0, *unconditional]
    return [after / ahead if ahead > 0 else 0.0 for ahead, after in zip(before, unconditional, strict=False)]
