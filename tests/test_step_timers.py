"""Jitter and the warning outside a calibration's range: theorems of the distributions, and one draw a step."""

import math
import statistics
from pathlib import Path

import pytest

from sim.build import build
from sim.calibration_schema import load_calibration
from sim.models.hardware import hardware
from sim.models.shapes import load_shape
from sim.models.step_timers import Jittered, Watched
from sim.models.timing import NO_COST, StepCost, StepShape, TimingModel
from sim.scenario import ScenarioError, load_scenario


class Always:
    """Every step takes 1 ms."""

    def step_cost(self, step: StepShape) -> StepCost:
        return NO_COST._replace(linear=1_000_000)


def totals(count: int, **how: object) -> list[int]:
    timer = Jittered(Always(), 7, **how)  # type: ignore[arg-type]
    return [timer.step_cost(StepShape()).total for _ in range(count)]


def test_lognormal_jitter_has_its_median_and_spread() -> None:
    logs = [math.log(total / 1e6) for total in totals(5000, sigma=0.1)]
    # Standard errors over 5,000 draws: 0.0018 of the median, 0.001 of the spread.
    assert statistics.median(logs) == pytest.approx(0, abs=0.006)
    assert statistics.stdev(logs) == pytest.approx(0.1, abs=0.004)


def test_residuals_are_drawn_from_their_quantiles() -> None:
    # Quantiles -0.2, 0, 0.1: half the draws below 1, none outside.
    logs = [math.log(total / 1e6) for total in totals(4000, residuals=(-0.2, 0.0, 0.1))]
    assert min(logs) >= -0.2001
    assert max(logs) <= 0.1001
    assert sum(log < 0 for log in logs) / 4000 == pytest.approx(0.5, abs=0.03)
    # Even between quantiles: a quarter below -0.1.
    assert sum(log < -0.1 for log in logs) / 4000 == pytest.approx(0.25, abs=0.03)


def test_stalls_come_as_often_as_asked() -> None:
    stalled = [total for total in totals(10_000, stall_rate=0.01, stall_ns=5_000_000) if total > 1_000_000]
    assert set(stalled) == {6_000_000}
    assert len(stalled) == pytest.approx(100, abs=40)


def test_a_draw_belongs_to_its_step() -> None:
    assert totals(600, sigma=0.2) == totals(600, sigma=0.2)
    assert totals(300, sigma=0.2) == totals(600, sigma=0.2)[:300]
    # Stalls have a stream of their own: the factor of a step does not change with them.
    with_stalls = totals(300, sigma=0.2, stall_rate=0.5, stall_ns=10**12)
    assert all(
        total in (plain, plain + 10**12) for total, plain in zip(with_stalls, totals(300, sigma=0.2), strict=True)
    )


def test_the_range_is_warned_of_once() -> None:
    told: list[str] = []
    model = TimingModel(load_shape("llama-3.1-8b"), hardware("h200"), load_calibration("h200"))
    timer = Watched(model, told.append)
    step = StepShape()
    step.add_decode(1, 1000)
    assert timer.step_cost(step) == model.step_cost(step)
    assert told == []
    step.add_decode(1, 10_000_000)
    timer.step_cost(step)
    timer.step_cost(step)
    (text,) = told
    assert "h200" in text


SCENARIO = """model: llama-3.1-8b
hardware: h200
engine: {max_model_len: 4096, num_gpu_blocks: 2000}
workload: {synthetic: {num_requests: 5, prompt_tokens: 100, output_tokens: 20}}
"""


def ended(folder: Path, *overrides: str) -> int:
    file = folder / "scenario.yaml"
    file.write_text(SCENARIO)
    simulation = build(load_scenario(file, overrides))
    simulation.run()
    return simulation.now


def test_jitter_of_a_scenario(tmp_path: Path) -> None:
    plain = ended(tmp_path)
    assert ended(tmp_path, "timing.jitter={sigma: 0}") == plain
    assert ended(tmp_path, "timing.jitter={sigma: 0.1}") != plain
    assert ended(tmp_path, "timing.jitter={model: residuals}") != plain
    slow = ended(tmp_path, "timing.jitter={sigma: 0, stalls_per_1000_steps: 1000, stall_ms: 100}")
    assert slow > plain + 1_000_000_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["timing.fixed_step_ms=1", "timing.jitter={sigma: 0.1}"], "timing.jitter"),
        (["timing.calibration=h20"], "there is no calibration of that name"),
        (["timing.calibration=b200", "timing.jitter={model: residuals}"], "has no residuals"),
        (["timing.attention_kernel=fa4"], "timing.attention_kernel"),
        (["engine.quantization=int4"], "engine.quantization"),
        (["engine.tensor_parallel_size=16"], "tensor_parallel_size"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        ended(tmp_path, *overrides)


def test_a_calibration_of_ones_own_and_another_cards(tmp_path: Path) -> None:
    from sim.calibration_schema import calibration_text

    (tmp_path / "mine.yaml").write_text(calibration_text(load_calibration("h200")))
    assert ended(tmp_path, "timing.calibration=mine.yaml") == ended(tmp_path)
    file = tmp_path / "scenario.yaml"
    warnings = build(load_scenario(file, ["timing.calibration=a100"])).warnings
    assert any("fitted on A100" in warning for warning in warnings)


def test_fp8_weights_take_half_the_room_and_less_time(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace(", num_gpu_blocks: 2000", ""))
    plain, fp8 = (build(load_scenario(file, one)) for one in ([], ["engine.quantization=fp8"]))
    # 6.98e9 weights of the layers, a byte less each, in blocks of 16 tokens with 131,072 bytes of KV.
    more = fp8.settings.num_gpu_blocks - plain.settings.num_gpu_blocks
    assert more == pytest.approx(6.98e9 / (16 * 131_072), rel=0.01)
    plain.run()
    fp8.run()
    assert fp8.now < plain.now
