"""What a trace is like: how many requests, how fast and in what bursts, how long, how much of their prompts is shared.

Knows: requests as a workload hands them over. Must not know: formats of files, or who serves the requests.

One pass in bounded memory: lengths are counted exactly (one counter a length that occurs), rates in at most 4,096
windows that double as time goes on, correlations on at most 131,072 requests evenly spread over the trace, and blocks
of prompts are remembered up to 2 million; what is shared is measured over the requests until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from workloads.sessions import Sessions
from workloads.spec import RequestSpec, output_stream, prompt_stream

QUANTILES: Final = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_BATCH = 16_384
_MOST_WINDOWS = 4096
_MOST_PAIRS = 131_072
_MOST_BLOCKS = 2_000_000
_DISPERSION_WINDOWS = 100


class LengthCounts:
    """How often each length occurs, exactly."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Count these."""
        values, counts = np.unique(lengths, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.counts[value] += count

    def quantiles(self, levels: Iterable[float]) -> list[int]:
        """For each level p the smallest length that at least a share p of the requests does not pass."""
        if not self.counts:
            return [0 for _ in levels]
        values = sorted(self.counts)
        below = np.cumsum([self.counts[value] for value in values])
        total = int(below[-1])
        found = np.searchsorted(below, [max(p * total - 1e-9, 1.0) for p in levels])
        return [values[int(at)] for at in found]

    def mean(self) -> float:
        """0 where nothing was counted."""
        total = sum(self.counts.values())
        return sum(value * count for value, count in self.counts.items()) / total if total else 0.0


class _Windows:
    """Arrivals in windows of equal length, which doubles whenever there would be too many."""

    def __init__(self) -> None:
        self.width_ns = 1_000_000
        self.counts = np.zeros(_MOST_WINDOWS, dtype=np.int64)
        self.last_ns = 0

    def add(self, arrivals_ns: NDArray[np.int64]) -> None:
        self.last_ns = max(self.last_ns, int(arrivals_ns[-1]))
        while self.last_ns // self.width_ns >= _MOST_WINDOWS:
            folded = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([folded, np.zeros(_MOST_WINDOWS // 2, dtype=np.int64)])
            self.width_ns *= 2
        self.counts += np.bincount(arrivals_ns // self.width_ns, minlength=_MOST_WINDOWS)

    def regrouped(self, wanted: int) -> tuple[float, NDArray[np.int64]]:
        """At most `wanted` windows over the whole time: their length in seconds, and the arrivals in each."""
        used = self.last_ns // self.width_ns + 1
        each = -(-used // wanted)
        padded = np.zeros(-(-used // each) * each, dtype=np.int64)
        padded[:used] = self.counts[:used]
        return each * self.width_ns / 1e9, padded.reshape(-1, each).sum(axis=1)


class PrefixReuse:
    """How many of a prompt's first tokens stood in full blocks of the same content before, in a cache without end."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.full = False
        self._seen: set[int] = set()

    def hit_tokens(self, spec: RequestSpec) -> int:
        """Tokens of `spec`'s prompt that were there; then remembers its blocks (in conversations its answer's too)."""
        segments = spec.prompt
        if spec.conversation < 0:
            if len(segments) == 1 and segments[0][0] == prompt_stream(spec.index):
                return 0  # nobody else ever has this
        else:
            segments = (*segments, (output_stream(spec.index), 0, spec.max_tokens))
        hit = 0
        missed = False
        for name in self._names(segments):
            if not missed and name in self._seen and (hit + 1) * self.block_tokens <= spec.num_prompt_tokens:
                hit += 1
                continue
            missed = True
            self._seen.add(name)
        self.full = len(self._seen) > _MOST_BLOCKS
        return hit * self.block_tokens

    def _names(self, segments: Iterable[tuple[int, int, int]]) -> Iterator[int]:
        """A name for each full block, which tells all content up to its end."""
        size = self.block_tokens
        name = 0
        pieces: list[int] = []
        room = size
        for stream, start, count in segments:
            while count:
                taken = min(count, room)
                pieces += (stream, start, taken)
                start += taken
                count -= taken
                room -= taken
                if not room:
                    name = hash((name, *pieces))
                    yield name
                    pieces = []
                    room = size


@dataclass
class Summary:
    """What a trace is like. Times in seconds, lengths in tokens; see the module's docstring for what is exact.

    num_requests          requests seen
    has_times             false for conversations without arrival times: then what follows about rates is 0
    duration_s            from the first arrival to the last
    rate_per_s            (num_requests - 1) / duration
    gap_cv                standard deviation over mean of the gaps: 1 for Poisson; burstiness as vLLM's is 1 / cv**2
    dispersion            variance over mean of the arrivals in 100 windows: near gap_cv**2 unless the rate drifts
    peak_rate_per_s       highest rate in those windows
    window_s, windows     arrivals in up to 200 windows, for pictures and fits
    rank_correlation      Spearman's, of prompt and output
    block_tokens          tokens a block, for what is shared
    shared_token_share    share of prompt tokens that stood in earlier blocks, in a cache without end
    shared_request_share  share of requests with such tokens
    reuse_requests        how many requests that was measured on
    conversations, most_turns   how many conversations, and the longest
    pairs                 (prompt, output, shared) of requests evenly spread over the trace, shape (n, 3)
    """

    num_requests: int = 0
    has_times: bool = True
    duration_s: float = 0.0
    rate_per_s: float = 0.0
    gap_cv: float = 0.0
    dispersion: float = 0.0
    peak_rate_per_s: float = 0.0
    window_s: float = 0.0
    windows: list[int] = field(default_factory=list)
    prompt: LengthCounts = field(default_factory=LengthCounts)
    output: LengthCounts = field(default_factory=LengthCounts)
    rank_correlation: float = 0.0
    block_tokens: int = 16
    shared_token_share: float = 0.0
    shared_request_share: float = 0.0
    reuse_requests: int = 0
    conversations: int = 0
    most_turns: int = 0
    pairs: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without `pairs` and with quantiles instead of counts."""
        lengths: dict[str, Any] = {}
        for name in ("prompt", "output"):
            counts: LengthCounts = getattr(self, name)
            at = zip(QUANTILES, counts.quantiles(QUANTILES), strict=True)
            lengths[f"{name}_tokens"] = {"mean": counts.mean(), **{f"p{100 * p:g}": value for p, value in at}}
        left = {"prompt", "output", "pairs"}
        plain = {name: value for name, value in vars(self).items() if name not in left}
        return {**plain, **lengths}


def inspect_requests(specs: Iterable[RequestSpec], block_tokens: int = 16, has_times: bool = True) -> Summary:
    """Look at every request once. `block_tokens`: tokens a block, for what is shared."""
    summary = Summary(block_tokens=block_tokens, has_times=has_times)
    windows = _Windows()
    reuse = PrefixReuse(block_tokens)
    shared_tokens = prompt_tokens = shared_requests = 0
    first_ns = last_ns = 0
    squares = 0.0
    pairs: list[tuple[int, int, int]] = []
    stride = 1
    stream = iter(specs)
    while batch := list(islice(stream, _BATCH)):
        hits = [0] * len(batch)
        if not reuse.full:
            hits = [reuse.hit_tokens(spec) for spec in batch]
            shared_tokens += sum(hits)
            shared_requests += sum(hit > 0 for hit in hits)
            prompt_tokens += sum(spec.num_prompt_tokens for spec in batch)
            summary.reuse_requests += len(batch)
        arrivals = np.array([spec.arrival_ns for spec in batch], dtype=np.int64)
        prompts = np.array([spec.num_prompt_tokens for spec in batch], dtype=np.int64)
        outputs = np.array([spec.max_tokens for spec in batch], dtype=np.int64)
        summary.prompt.add(prompts)
        summary.output.add(outputs)
        summary.conversations = max(summary.conversations, 1 + max(spec.conversation for spec in batch))
        summary.most_turns = max(summary.most_turns, *(spec.turn + 1 for spec in batch if spec.conversation >= 0), 0)
        if summary.num_requests == 0:
            first_ns = last_ns = int(arrivals[0])
        gaps_s = np.diff(arrivals, prepend=last_ns) / 1e9
        squares += float(np.square(gaps_s).sum())
        last_ns = int(arrivals[-1])
        if has_times:
            windows.add(arrivals - first_ns)
        start = -summary.num_requests % stride
        pairs += [(batch[i].num_prompt_tokens, batch[i].max_tokens, hits[i]) for i in range(start, len(batch), stride)]
        summary.num_requests += len(batch)
        while len(pairs) > _MOST_PAIRS:
            pairs = pairs[::2]
            stride *= 2
    summary.pairs = np.array(pairs, dtype=np.int64).reshape(-1, 3)
    if prompt_tokens:
        summary.shared_token_share = shared_tokens / prompt_tokens
        summary.shared_request_share = shared_requests / summary.reuse_requests
    summary.rank_correlation = rank_correlation(summary.pairs[:, 0], summary.pairs[:, 1])
    if has_times:
        _tell_times(summary, windows, (last_ns - first_ns) / 1e9, squares)
    return summary


def conversation_requests(sessions: Sessions) -> Iterator[RequestSpec]:
    """Every request of every session, one session after the other, all at time 0; for `inspect_requests`."""
    for opening in sessions.openings():
        spec: RequestSpec | None = opening.at(0)
        while spec is not None:
            yield spec
            spec = sessions.follow(spec, 0)


def rank_correlation(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Spearman's; 0 where one of the two does not vary, or there are fewer than 3."""
    if len(first) < 3 or first.min() == first.max() or second.min() == second.max():
        return 0.0
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[which]


def _tell_times(summary: Summary, windows: _Windows, duration_s: float, squares: float) -> None:
    gaps = summary.num_requests - 1
    summary.duration_s = duration_s
    if gaps < 1 or duration_s <= 0:
        return
    mean = duration_s / gaps
    summary.rate_per_s = 1 / mean
    summary.gap_cv = float(np.sqrt(max(squares / gaps - mean**2, 0.0)) / mean)
    width_s, counts = windows.regrouped(_DISPERSION_WINDOWS)
    whole = counts[:-1] if len(counts) > 2 else counts  # the last may be a part
    summary.dispersion = float(whole.var() / whole.mean()) if whole.mean() else 0.0
    summary.peak_rate_per_s = float(counts.max() / width_s)
    summary.window_s, fine = windows.regrouped(2 * _DISPERSION_WINDOWS)
    summary.windows = fine.tolist()
