"""Model shapes: published counts of weights, KV bytes by hand, and every refusal of a config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.models.shapes import ShapeError, UnknownName, drafter_shape, kv_dtype_bytes, load_shape

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    config = {key: value for key, value in {**LLAMA_8B, **changes}.items() if value is not ...}
    file.write_text(json.dumps(config))
    return file


# What the models' pages on Hugging Face give as their number of parameters.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-0.6B", 596_049_920),
    ],
)
def test_published_number_of_parameters(name: str, parameters: int) -> None:
    shape = load_shape(name)
    assert shape.num_parameters() == parameters
    assert shape.weight_bytes("bfloat16") == 2 * parameters
    assert load_shape(name.upper()) is shape


def test_kv_bytes_by_hand() -> None:
    llama = load_shape("llama-3.1-8b")
    # Keys and values, 32 layers, 8 heads of 128, 2 bytes: 128 KiB a token.
    assert llama.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert llama.kv_bytes_per_token(1) == 65_536
    assert llama.kv_bytes_per_token(2, tp=4) == 32_768
    # Sixteen ranks share 8 heads: each keeps one.
    assert llama.kv_bytes_per_token(2, tp=16) == 16_384
    assert kv_dtype_bytes("auto", "bfloat16") == kv_dtype_bytes("auto", "fp8") == 2
    assert kv_dtype_bytes("fp8", "bfloat16") == 1


def test_matrices_of_a_rank() -> None:
    linears = {linear.name: (linear.n, linear.k) for linear in load_shape("llama-3.1-8b").layer_linears(tp=2)}
    assert linears == {"qkv": (3072, 4096), "o": (4096, 2048), "gate_up": (14336, 4096), "down": (4096, 7168)}


def test_fp8_halves_the_matrices_only() -> None:
    shape = load_shape("llama-3.1-8b")
    embeddings_and_norms = 2 * 128256 * 4096 + 65 * 4096
    assert shape.weight_bytes("fp8") == 8_030_261_248 + embeddings_and_norms


def test_ranks_must_divide_the_heads() -> None:
    shape = load_shape("llama-3.1-8b")
    with pytest.raises(ShapeError, match="num_attention_heads 32"):
        shape.heads(3)


def test_a_config_json_is_the_builtin_model(tmp_path: Path) -> None:
    file = written(tmp_path)
    known = load_shape("llama-3.1-8b")
    for path in (file, tmp_path, str(tmp_path)):
        shape = load_shape(path)
        assert shape.num_parameters() == known.num_parameters()
        assert shape.kv_bytes_per_token(2) == known.kv_bytes_per_token(2)


def test_a_window_that_is_off_is_full_attention(tmp_path: Path) -> None:
    # As in Qwen2's and Qwen3's config.json.
    load_shape(written(tmp_path, sliding_window=131072, use_sliding_window=False))
    load_shape(written(tmp_path, sliding_window=None, layer_types=["full_attention"] * 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, r"sliding_window = 4096: sliding-window attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types\[1\] = \"linear_attention\": hybrid"),
        ({"layer_types": "full_attention"}, "expected a list"),
        ({"num_local_experts": 8}, r"num_local_experts = 8: mixture of experts"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"n_routed_experts": 256}, "mixture of experts"),
        ({"kv_lora_rank": 512}, r"qk_nope_head_dim: missing"),
        ({"mamba_d_state": 128}, "Mamba"),
        ({"is_encoder_decoder": True}, "encoder-decoders"),
        ({"text_config": {}}, "multi-modal"),
        ({"hidden_size": ...}, r"hidden_size: missing"),
        ({"hidden_size": "4096"}, r'hidden_size = "4096": expected a whole number'),
        ({"hidden_size": 4096.0}, r"hidden_size = 4096\.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 5}, "must divide num_attention_heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, "head_dim: missing"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings = "no": expected true or false'),
    ],
)
def test_what_has_no_shape_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message) as caught:
        load_shape(written(tmp_path, **changes))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"hidden_size": 1,\n oops}', r"config\.json:2: malformed JSON"),
        (b"\x80\x02\xff\x00", "not a text file"),
        (b"[1, 2]", "expected an object"),
        (b"", r"config\.json:1: malformed JSON"),
        (b"[" * 100_000, "malformed JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "malformed JSON"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ShapeError, match=message):
        load_shape(file)


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"no config\.json in this folder"):
        load_shape(tmp_path)
    with pytest.raises(ShapeError, match="no such file"):
        load_shape(tmp_path / "absent.json")
    with pytest.raises(ShapeError, match="cannot be read"):
        load_shape("./a\0b")
    with pytest.raises(UnknownName, match=r"did you mean .*Llama-3\.1-8B"):
        load_shape("llama-3.1-8bb")


def test_an_eagle3_head_by_hand() -> None:
    # yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: three hidden states to one, a layer whose qkv reads two, 32,000 rows.
    drafter = drafter_shape(load_shape("llama-3.1-8b"), "eagle3")
    fc, qkv, o = 3 * 4096 * 4096, 2 * 4096 * (32 + 16) * 128, 4096 * 4096
    mlp, head = 3 * 4096 * 14336, 32000 * 4096
    assert drafter.num_parameters() == fc + qkv + o + mlp + head
    assert drafter.weight_bytes() == 2 * drafter.num_parameters()
    # One layer of 8 KV heads in the target's block table: 4 KiB a token beside its 128.
    assert drafter.kv_bytes_per_token(2) == 4096
    assert drafter.kv_bytes_per_token(2, tp=8) == 512


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-8b", "qwen3-32b"])
def test_a_head_adds_one_layer_of_kv(name: str, method: str) -> None:
    target = load_shape(name)
    assert drafter_shape(target, method).kv_bytes_per_token(2) == target.kv_bytes_per_token(2) // target.num_layers


def test_a_draft_model_adds_its_own_layers_and_ngram_nothing() -> None:
    target = load_shape("qwen3-8b")
    small = drafter_shape(target, "draft_model", "Qwen/Qwen3-1.7B")
    assert small.kv_bytes_per_token(2) == 2 * 28 * 8 * 128 * 2
    assert small.num_parameters() == load_shape("qwen3-1.7b").num_parameters()
    assert drafter_shape(target, "draft_model").layers is load_shape("qwen3-0.6b")
    ngram = drafter_shape(target, "ngram")
    assert (ngram.kv_bytes_per_token(2), ngram.weight_bytes(), ngram.layer_linears()) == (0, 0, ())


def test_drafters_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    target = load_shape("llama-3.1-8b")
    with pytest.raises(ShapeError, match="allowed: eagle, eagle3"):
        drafter_shape(target, "medusa")
    with pytest.raises(UnknownName, match="EAGLE-3 head"):
        drafter_shape(target, "eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-9B")
    with pytest.raises(ShapeError, match="hidden_size 5120"):
        drafter_shape(target, "eagle3", "AngelSlim/Qwen3-32B_eagle3")
    with pytest.raises(ShapeError, match="no drafter is known"):
        drafter_shape(load_shape(written(tmp_path)), "draft_model")


# Mixtures of experts and latent attention


@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes"),
    [
        # Model cards and reports: 46.7B and 12.9B; 30.5B and 3.3B; 235B and 22B; 671B and 37B (with the embedding).
        ("mixtral-8x7b", 46_702_792_704, 12.9e9, 131_072),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 98_304),
        ("qwen3-235b-a22b", 235.1e9, 22.2e9, 192_512),
        # 61 layers of 512 + 64 elements: about 70 KB a token, against 516 KB of a Llama-3.1-405B (DeepSeek-V3 report).
        ("deepseek-v3", 671.0e9, 37.5e9, 70_272),
        ("mistral-7b", 7_248_023_552, 7.25e9, 131_072),
        ("llama-3.3-70b", 70_553_706_496, 70.5e9, 327_680),
    ],
)
def test_published_counts_of_weights(name: str, total: float, active: float, kv_bytes: int) -> None:
    shape = load_shape(name)
    assert shape.num_parameters() == pytest.approx(total, rel=2e-3)
    taken = shape.num_active_linear_parameters() + 2 * shape.vocab_size * shape.hidden_size
    assert taken == pytest.approx(active, rel=0.02)
    assert shape.kv_bytes_per_token(2) == kv_bytes


def test_experts_that_a_batch_touches() -> None:
    # 8 experts, 2 a token: one token touches 2, two tokens 2 + 2 * 6 / 8 = 3.5, many all 8.
    moe = load_shape("mixtral-8x7b").moe
    assert moe is not None
    assert [moe.expected_experts(tokens) for tokens in (1, 2, 1000)] == pytest.approx([2, 3.5, 8])


def test_latent_kv_is_on_every_rank_and_the_predicting_layer_adds_one() -> None:
    shape = load_shape("deepseek-v3")
    assert shape.kv_bytes_per_token(2, tp=8) == shape.kv_bytes_per_token(2)
    mtp = drafter_shape(shape, "mtp")
    assert mtp.kv_bytes_per_token(2) == 576 * 2
    # The report gives 11.5B of its own weights beside the shared embedding and head.
    assert mtp.num_parameters() == pytest.approx(11.5e9, rel=0.02)


def test_a_config_with_experts_is_read(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40_960,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert load_shape(file).num_parameters() == load_shape("qwen3-30b-a3b").num_parameters()
    for changes, message in (
        ({"model_type": "llama4"}, "mixture of experts of model_type"),
        ({"decoder_sparse_step": 2}, "dense layers between"),
        ({"num_experts_per_tok": 129}, "there are 128 experts"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1"),
    ):
        file.write_text(json.dumps(config | changes))
        with pytest.raises(ShapeError, match=message):
            load_shape(file)
