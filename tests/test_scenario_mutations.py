"""2,000 scenarios that something went wrong with: a `Scenario` or a `ScenarioError` comes out in time, nothing else."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.scenario import Scenario, ScenarioError, load_scenario
from sim.shipped import shipped_scenarios

SHIPPED = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(shipped_scenarios().glob("*.yaml"))]
SCENARIOS = [*SHIPPED, *(load_scenario(file).resolved() for file in sorted(shipped_scenarios().glob("*.yaml")))]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 10**18, 10**40, -(10**400), 2**31, 2**63, 1e308, -0.0, 1e-320])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["5", "5s", "80GB", "yes", "1e3", "~", "null", "/", "..", "/dev/zero", "\u202e", "\x00", "é" * 50]
    )
    | st.sampled_from(["eagle3", "ngram", "draft_model", "priority", "replay", "gamma", "lognormal", "closed_loop"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.text(max_size=12) | st.sampled_from(
    ["rate", "tokens", "max_num_seq", "policy", "num_gpu_blocks_override", "synthetic", "trace", "model", "0", "<<"]
)


def containers(data: Any) -> list[Any]:
    found = [data] if isinstance(data, dict | list) and data else []
    for inner in data.values() if isinstance(data, dict) else data if isinstance(data, list) else []:
        found += containers(inner)
    return found


def like(value: Any) -> st.SearchStrategy[Any]:
    """Another value of the same type, so that more than the type checks is reached."""
    if isinstance(value, bool) or value is None:
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 20) | st.integers(0, 10_000)
    if isinstance(value, float):
        return st.floats(0, 1) | st.floats(0, 1000)
    if isinstance(value, list):
        return st.sampled_from([value[::-1], value[1:], value * 2])
    return st.just(value)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    data = copy.deepcopy(draw(st.sampled_from(SCENARIOS)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 3]))):
        places = containers(data)
        if not places:
            break
        place = draw(st.sampled_from(places))
        at = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        action = draw(
            st.sampled_from(["delete", "delete", "rename", "replace", "vary", "vary", "vary", "copy", "nest", "add"])
        )
        if action == "delete":
            del place[at]
        elif action == "rename" and isinstance(place, dict):
            place[draw(keys)] = place.pop(at)
        elif action == "copy":
            other = draw(st.sampled_from(places))
            place[at] = copy.deepcopy(other)
        elif action == "vary":
            place[at] = draw(like(place[at]))
        elif action == "nest":
            place[at] = draw(st.sampled_from([[place[at]], {"a": place[at]}, {str(at): place[at]}]))
        elif action == "add" and isinstance(place, dict):
            place[draw(keys)] = draw(values)
        else:
            place[at] = draw(values)
    text = json.dumps(data) if draw(st.booleans()) else yaml.safe_dump(data, allow_unicode=True)
    if draw(st.integers(0, 7)) == 0:  # and something wrong with the text itself: a line twice, a cut, a stray character
        lines = text.splitlines(keepends=True)
        line = draw(st.integers(0, len(lines) - 1))
        stray = draw(st.sampled_from(["&a ", "*a", "!!int ", "{", "]", "\t", '"', "? ", "---\n", "\ufeff", "%"]))
        lines[line] = draw(
            st.sampled_from([lines[line] * 2, lines[line][: len(lines[line]) // 2], stray + lines[line]])
        )
        text = "".join(lines)
    return text


overrides = st.lists(
    st.builds(
        lambda key, value: f"{key}={value}",
        st.sampled_from(
            ["seed", "engine.block_size", "events.0.at_s", "workload", "acceptance.rate", "engine", "a.b", ""]
        )
        | st.text(max_size=12),
        scalars.map(lambda value: json.dumps(value) if not isinstance(value, str) else value),
    ),
    max_size=2,
)


@settings(
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(text=mutated(), sets=st.just([]) | st.just([]) | overrides)
def test_a_scenario_or_a_scenario_error(text: str, sets: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.yaml"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        start = time.process_time()
        scenario, error = outcome(file, sets)
        assert time.process_time() - start < 5
        if error is not None:
            assert error.problems
            assert all(problem.reason for problem in error.problems)
            assert all(line.isprintable() for line in str(error).split("\n"))
        if scenario is not None:
            file.write_text(json.dumps(scenario.resolved(), allow_nan=False), encoding="utf-8")
            assert load_scenario(file).digest() == scenario.digest()


def outcome(file: Path, sets: list[str]) -> tuple[Scenario | None, ScenarioError | None]:
    try:
        return load_scenario(file, sets), None
    except ScenarioError as error:
        return None, error
