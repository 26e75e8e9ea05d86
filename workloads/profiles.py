"""Shipped profiles: generators fitted to public traces, as data. Facts with their sources; the traces are not here.

Knows: numbers. Must not know: where the traces lie. Each profile says what made it; `fit` says what is taken from a
trace and what is not. Written by the commands named, then formatted; not tuned by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from workloads.fit import LEVELS, Points, Shared, StandIn


@dataclass(frozen=True)
class Profile:
    """A generator with its `source`, and the `command` that fitted it to that."""

    name: str
    source: str
    command: str
    stand_in: StandIn


def _tokens(values: str) -> Points:
    """The quantiles at `LEVELS`."""
    return tuple(zip(LEVELS, map(int, values.split()), strict=True))


def _rows(values: str) -> tuple[tuple[float, float], ...]:
    """Rows from_s:rate_per_s."""
    return tuple((float(from_s), float(rate)) for from_s, rate in (row.split(":") for row in values.split()))


_ALL: Final = (
    Profile(
        "azure-2023-conv",
        (
            "Azure LLM inference trace 2023, conversations: all 19,366 requests of one hour. "
            "github.com/Azure/AzurePublicDataset, CC-BY"
        ),
        ("speckv workload fit azure2023_conv.csv --as-profile"),
        StandIn(
            num_requests=19366,
            rate_per_s=5.5301,
            burstiness=1.0,
            prompt=_tokens(
                "2 16 29 91 181 207 372 387 396 403 414 703 984 1020 1045 1071 1097 1130 1189 1315 "
                "1877 2735 4075 4083 4090 4098 4142 4831 6212 14050"
            ),
            output=_tokens(
                "7 14 16 24 41 54 67 77 85 91 96 103 113 129 151 177 217 384 395 400 411 424 430 451 "
                "509 540 601 644 954 1000"
            ),
            rank_correlation=0.073,
            rates=_rows(
                "0:3.4993 73.728:4.598 147.46:5.7916 221.18:5.3711 294.91:4.5437 368.64:4.3403 "
                "442.37:4.9778 516.1:5.0727 589.82:5.0591 663.55:5.1134 737.28:5.6017 811.01:5.1405 "
                "884.74:4.6115 958.46:4.6251 1032.2:5.2219 1105.9:5.8594 1179.6:6.0628 1253.4:5.8458 "
                "1327.1:6.7139 1400.8:6.6596 1474.6:6.3883 1548.3:7.0258 1622:8.138 1695.7:7.7989 "
                "1769.5:7.2428 1843.2:8.3957 1916.9:7.5141 1990.7:6.5918 2064.4:6.8495 2138.1:8.016 "
                "2211.8:5.2762 2285.6:5.344 2359.3:5.4389 2433:5.8729 2506.8:5.344 2580.5:5.8051 "
                "2654.2:5.778 2727.9:6.2256 2801.7:4.3267 2875.4:3.7571 2949.1:4.3132 3022.8:4.286 "
                "3096.6:4.5844 3170.3:4.286 3244:4.069 3317.8:4.2589 3391.5:3.9605 3465.2:2.164"
            ),
            repeat_s=3501.7,
        ),
    ),
    Profile(
        "azure-2023-code",
        (
            "Azure LLM inference trace 2023, code completion: the first 1,000 requests, 522 s. "
            "github.com/Azure/AzurePublicDataset, CC-BY"
        ),
        ("speckv workload fit azure2023_code_1000.csv --as-profile"),
        StandIn(
            num_requests=1000,
            rate_per_s=1.9153,
            burstiness=0.023103,
            prompt=_tokens(
                "6 11 15 17 50 103 169 252 390 678 865 1038 1200 1469 1847 2113 2366 2654 3180 3548 "
                "4566 5503 5923 6819 7435 7435 7436 7436 7436 7436"
            ),
            output=_tokens("6 6 6 6 6 7 7 8 9 9 10 11 12 13 14 15 17 18 21 26 35 52 61 84 121 155 283 433 792 841"),
            rank_correlation=-0.024,
        ),
    ),
    Profile(
        "mooncake-conversation",
        (
            "Mooncake FAST'25, conversations: the first 1,000 requests, 330 s. github.com/kvcache-ai/Mooncake, "
            "Apache-2.0"
        ),
        ("speckv workload fit mooncake_fast25_conversation_1000.jsonl --as-profile"),
        StandIn(
            num_requests=1000,
            rate_per_s=3.0273,
            burstiness=0.73791,
            prompt=_tokens(
                "14 120 192 334 385 413 524 662 849 1093 1854 3387 4547 5511 6810 8306 9703 11583 "
                "13864 16676 20100 26379 33869 41048 54497 71590 81476 81476 81476 81476"
            ),
            output=_tokens(
                "1 1 3 3 11 25 44 107 164 226 270 311 344 365 389 414 439 459 490 521 555 599 621 666 "
                "775 856 1005 1294 2000 2000"
            ),
            rank_correlation=0.084,
            shared=Shared(
                50,
                _tokens(
                    "512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 1024 "
                    "3072 6656 10240 15872 20992 26112 40448 40448 40448 40448"
                ),
                1.0,
            ),
        ),
    ),
    Profile(
        "sharegpt",
        (
            "ShareGPT prompts answered by Llama-3.1-8B, as SpecDecode-Bench recorded them: 306 of 310, without "
            "the four whose answers pass 4,000 tokens. Their arrivals are not recorded"
        ),
        ("fit() on the prompt_tokens and generated_tokens of its sharegpt.jsonl.gz, answers up to 4,000"),
        StandIn(
            num_requests=306,
            rate_per_s=None,
            burstiness=1.0,
            prompt=_tokens(
                "39 39 40 40 45 48 53 56 60 66 80 98 124 188 246 300 341 410 434 530 697 802 806 1134 "
                "1644 2348 2556 3387 3576 3576"
            ),
            output=_tokens(
                "3 5 10 20 56 158 260 313 358 412 452 487 537 566 614 663 696 752 790 883 1000 1143 "
                "1261 1402 1542 1717 1868 2401 3469 3469"
            ),
            rank_correlation=0.23,
        ),
    ),
)

PROFILES: Final[Mapping[str, Profile]] = {profile.name: profile for profile in _ALL}
"""By name."""
