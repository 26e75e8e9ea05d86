"""Greedy speculative decoding on the paged cache: it says what plain decoding says, whatever happens on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `gpu`: torch is not installed")

from gpu_backend.decoder import Decoder, DecoderShape  # noqa: E402
from gpu_backend.run import Ask, Decoded, KnowingDrafter, Scene, TokenContent, decode  # noqa: E402
from gpu_backend.shadow import Shadow  # noqa: E402
from sim.core.block_hashes import BlockHashes  # noqa: E402
from sim.core.settings import Settings  # noqa: E402
from sim.models.shapes import load_shape  # noqa: E402
from sim.policies.axes import UNDO  # noqa: E402
from sim.policies.presets import PRESETS, VLLM_PRESETS  # noqa: E402
from tests.gpu_faults import FAULTS, NAMES  # noqa: E402
from tests.gpu_scenes import decoder, plain, random_scene  # noqa: E402

pytestmark = pytest.mark.xdist_group("gpu_decoder")

NUM_SCENES = 300
SOUND = ("vllm-0.32", "vllm-0.30", "vllm-0.28")


@dataclass
class Served:
    """One scene, what came out, and what should have."""

    seed: int
    scene: Scene
    answers: list[tuple[int, ...]]
    decoded: Decoded
    shadow: Shadow

    def is_lossless(self) -> bool:
        """All tokens of plain decoding; of an aborted request those that were delivered before."""
        done = self.decoded
        return all(
            output == list(answer[: len(output)]) if done.aborted[number] else output == list(answer)
            for number, (output, answer) in enumerate(zip(done.outputs, self.answers, strict=True))
        )


def serve(seed: int, scene: Scene, number: int, max_turns: int = 2_000) -> Served:
    answers = plain(number, scene)
    shadow = Shadow(scene.settings.num_gpu_blocks, scene.settings.block_size)
    decoded = decode(decoder(number), scene, answers=answers, observers=[shadow], max_turns=max_turns)
    return Served(seed, scene, answers, decoded, shadow)


@pytest.fixture(scope="module")
def served() -> list[Served]:
    scenes = []
    for seed in range(NUM_SCENES):
        number, scene = random_scene(seed)
        scenes.append(serve(seed, scene, number))
    return scenes


def test_300_random_scenes_are_lossless(served: list[Served]) -> None:
    """Every preset and undo rule, sync and async, in float64; every slot that holds nothing right is NaN."""
    assert [each.seed for each in served if not each.is_lossless()] == []


def test_no_scene_stalls(served: list[Served]) -> None:
    assert [each.seed for each in served if each.decoded.stalled] == []


def test_shadow_execution_finds_nothing_in_them(served: list[Served]) -> None:
    assert [each.shadow.findings[0] for each in served if each.shadow.findings] == []


def test_the_scenes_are_not_vacuous(served: list[Served]) -> None:
    """Each of these happens in at least 30 scenes, async and sync together."""
    happened = Counter[str]()
    for each in served:
        done, settings = each.decoded, each.scene.settings
        happened["async"] += settings.async_scheduling
        happened["sync"] += not settings.async_scheduling
        happened["preempted"] += done.num_preemptions > 0
        happened["hit"] += done.num_hit_tokens > 0
        happened["hit another's"] += each.shadow.num_hit_reads > 0
        happened["accepted"] += done.num_accepted_tokens > 0
        happened["rejected"] += done.num_rejected_tokens > 0
        happened["reset"] += done.num_resets > 0
        happened["aborted"] += any(done.aborted)
        happened["stale frames"] += done.num_stale_frames > 0
        happened["reused in flight"] += each.shadow.num_reused_in_flight > 0
        happened["one slot a block"] += settings.block_size == 1
    assert {what: count for what, count in happened.items() if count < 30} == {}


def test_the_scenes_cover_presets_and_undo_rules(served: list[Served]) -> None:
    with_drafts = [each.scene for each in served if each.decoded.num_rejected_tokens > 0]
    undo = Counter((type(scene.rules.undo).__name__, scene.settings.async_scheduling) for scene in with_drafts)
    assert {name for name, _ in undo} == {type(rule).__name__ for rule in UNDO.values()}
    assert min(undo.values()) >= 2
    for preset in VLLM_PRESETS:
        assert sum(scene.rules is PRESETS[preset] for scene in with_drafts) >= 5, preset


def test_under_priority_a_victim_that_was_scheduled_already_leaves_blocks_that_nobody_wrote() -> None:
    """A fault of the released engines, not of ours, and both of our checks see it.

    Request 0 is scheduled for a chunk of 8 tokens, which puts four blocks into the prefix cache; then request 1, which
    is more urgent, needs a block in the same step and takes request 0's. The frame is withdrawn, the hashes stay; when
    request 0 is admitted again it hits blocks that no step has written.
    Source: vllm-project/vllm, issue 57580 and pull request 43569.
    """
    prompt = tuple(range(1, 61))
    settings = Settings(
        num_gpu_blocks=15,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        priority=True,
        long_prefill_token_threshold=8,
        async_scheduling=False,
    )
    asks = (Ask(prompt[:24], 3, 0, 1), Ask(prompt[40:44], 2, 1, 0), Ask(prompt[20:44], 3, 0, 2))
    done = serve(0, Scene(settings, PRESETS["vllm-0.32"], asks), 0)
    assert done.decoded.num_preemptions >= 1
    assert not done.is_lossless()
    assert "request r0 reads position 16 of 24" in done.shadow.findings[0]
    assert "nothing: no step has written it" in done.shadow.findings[0]


def test_vllm_0_24_loses_tokens_at_resets_of_running_requests() -> None:
    """`async_tokens_to_discard` is set in tokens and drained in frames, so valid tokens are thrown away."""
    lost = 0
    for seed in range(12):
        number, scene = random_scene(seed, ["vllm-0.24"], is_async=True, lossy_resets=True)
        try:
            lost += not serve(seed, scene, number, max_turns=300).is_lossless()
        except IndexError:  # A position behind the block table.
            lost += 1
    assert lost >= 1


@pytest.mark.parametrize("fault", NAMES)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the decoder's output in several scenes, and in each of these by shadow execution too."""
    plant, wants = FAULTS[fault]
    scenes = [random_scene(seed, SOUND, **wants) for seed in range(40)]
    for number, scene in scenes:
        plain(number, scene)
    plant(monkeypatch)
    by_output, by_shadow = [], []
    for seed, (number, scene) in enumerate(scenes):
        try:
            done = serve(seed, scene, number, max_turns=300)
        except IndexError:
            continue
        if not done.is_lossless():
            by_output.append(seed)
        if done.shadow.findings:
            by_shadow.append(seed)
    assert len(by_output) >= 3
    assert set(by_output) <= set(by_shadow)


def test_a_drafter_that_is_always_right_takes_a_third_of_the_steps() -> None:
    """K = 2 and acceptance 1: one step of prefill gives 1 token, each further step 3; 13 tokens are 1 + 4 steps."""
    settings = Settings(
        num_gpu_blocks=40,
        block_size=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        async_scheduling=False,
        num_speculative_tokens=2,
        num_lookahead_tokens=2,
    )
    for rate, steps in ((1.0, 5), (0.0, 13)):
        done = decode(decoder(0), Scene(settings, PRESETS["vllm-0.32"], (Ask((5, 6, 7), 13),), (), rate))
        assert done.num_steps == steps
        assert done.outputs[0] == decoder(0).plain_decode((5, 6, 7), 13)


def test_the_drafters_draws_are_a_pure_function_with_the_set_rate() -> None:
    answers = [[7] * 20_000]
    drafter = KnowingDrafter(answers, 0.7, 50, seed=3)
    bulk = drafter.draft(0, 0, 20_000)
    assert bulk[500:510] == [drafter.draft(0, number, 1)[0] for number in range(500, 510)]
    # Four standard deviations of a share of 20,000 draws: 0.013.
    assert sum(token == 7 for token in bulk) / 20_000 == pytest.approx(0.7, abs=0.013)
    assert all(0 <= token < 50 for token in bulk)


def test_content_hashes_are_equal_if_and_only_if_all_tokens_up_to_there_are() -> None:
    one, other, third = (TokenContent(tokens, 2) for tokens in ([1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 4]))
    hashes = [BlockHashes(), BlockHashes(), BlockHashes()]
    for content, into in zip((one, other, third), hashes, strict=True):
        content.extend_hashes(into, 2)
    assert hashes[0][0] == hashes[1][0] != hashes[2][0]
    assert len({each[1] for each in hashes}) == 3
    with pytest.raises(ValueError, match="3 blocks of 2 asked for, 4 tokens are known"):
        one.extend_hashes(BlockHashes(), 3)


def test_a_decoder_takes_its_shape_from_a_model() -> None:
    shape = DecoderShape.of(load_shape("llama-3.1-8b"), num_layers=1)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (32, 8, 128)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (4096, 14336, 128256)


def test_shapes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads 3 must divide num_attention_heads 4"):
        Decoder(DecoderShape(num_key_value_heads=3))
