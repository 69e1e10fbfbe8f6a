"""Exported weights give the same results in a torch model in the format of transformers."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from hpc3d.checkpoints.hf_families import PUBLISHED
from tests.checkpoints import drawn_models
from tests.checkpoints.test_hf_export import MIXTRAL, SERIAL, exported


def their_gpt2(weights, told, tokens):
    """GPT-2 in torch, with the names and the column order of Hugging Face."""
    heads, epsilon = told["n_head"], told["layer_norm_epsilon"]
    gelu = {"gelu_new": "tanh", "gelu": "none"}[told["activation_function"]]
    head = "wte.weight" if told["tie_word_embeddings"] else "lm_head.weight"
    w = {name.removeprefix("transformer."): torch.tensor(a) for name, a in weights.items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name, x):
        weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)

    x = w["wte.weight"][tokens] + w["wpe.weight"]
    for n in range(told["n_layer"]):
        qkv = linear(f"h.{n}.attn.c_attn", norm(f"h.{n}.ln_1", x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(f"h.{n}.attn.c_proj", a.transpose(1, 2).flatten(2))
        up = linear(f"h.{n}.mlp.c_fc", norm(f"h.{n}.ln_2", x))
        x = x + linear(f"h.{n}.mlp.c_proj", functional.gelu(up, approximate=gelu))
    return norm("ln_f", x) @ w[head].T


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("gpt2", "layers.3.norm1.gamma", ["transformer.h.3.ln_1.weight"]),
        ("gpt2", "layers.0.down.bias", ["transformer.h.0.mlp.c_proj.bias"]),
        ("gpt2", "embedding.token", ["transformer.wte.weight"]),
        ("gpt2", "head.table", ["lm_head.weight"]),
        (
            "qwen2",
            "layers.12.qkv.bias",
            [f"model.layers.12.self_attn.{part}_proj.bias" for part in "qkv"],
        ),
        (
            "bert",
            "layers.11.qkv.bias",
            [
                f"bert.encoder.layer.11.attention.self.{part}.bias"
                for part in ("query", "key", "value")
            ],
        ),
        (
            "bert",
            "layers.0.norm1.gamma",
            ["bert.encoder.layer.0.attention.output.LayerNorm.weight"],
        ),
        ("bert", "head.bias", ["cls.predictions.bias"]),
        ("mixtral", "layers.2.router.weight", ["model.layers.2.block_sparse_moe.gate.weight"]),
        (
            "mixtral",
            "layers.11.experts.up.weight",
            [f"model.layers.11.block_sparse_moe.experts.5.w{part}.weight" for part in "13"],
        ),
        (
            "mixtral",
            "layers.0.experts.down.weight",
            ["model.layers.0.block_sparse_moe.experts.5.w2.weight"],
        ),
    ],
)
def test_parameter_names_map_to_transformers_names(kind, ours, theirs):
    family = PUBLISHED[kind]
    assert [family.full_name_of(name) for name in family.names_of(ours, expert=5)] == theirs


@pytest.mark.parametrize("model", ["", "tied=false gelu=exact heads=3"])
def test_exported_gpt2_has_the_same_logits_in_torch(tmp_path, model):
    target = exported(tmp_path, f"{SERIAL} {model}")
    told = json.loads((target / "config.json").read_text())
    tokens = drawn_models.tokens_of(told["vocab_size"], told["n_positions"])
    weights = load_file(target / "model.safetensors")
    found = drawn_models.logits(tmp_path / "run" / "checkpoints" / "step-00000000", tokens)
    expected = their_gpt2(weights, told, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(found).max() > 0.1


def turned(x, told):
    """Apply rotary positions with the settings of config.json."""
    half, (theta, scaling) = x.shape[-1] // 2, (told["rope_theta"], told["rope_scaling"])
    speed = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    if scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        rotations = scaling["original_max_position_embeddings"] * speed / (2 * torch.pi)
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        speed = speed * (kept + (1 - kept) / scaling["factor"])
    angles = torch.arange(x.shape[-2])[:, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
    )


def their_llama(weights, told, tokens):
    """Llama or Mixtral in torch, with the names and the layout of Hugging Face."""
    heads, shared = told["num_attention_heads"], told["num_key_value_heads"]
    head = "embed_tokens.weight" if told["tie_word_embeddings"] else "lm_head.weight"
    w = {name.removeprefix("model."): torch.tensor(a) for name, a in weights.items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name, x):
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + told["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def swiglu(y, gate, up, down):
        return linear(down, functional.silu(linear(gate, y)) * linear(up, y))

    def mixture(at, y):
        chances, out = linear(f"{at}.gate", y).softmax(-1), torch.zeros_like(y)
        best, chosen = chances.topk(told["num_experts_per_tok"])
        best = best / best.sum(-1, keepdim=True)
        for expert in range(told["num_local_experts"]):
            weight = (best * (chosen == expert)).sum(-1, keepdim=True)
            parts = (f"{at}.experts.{expert}.w{part}" for part in (1, 3, 2))
            out += weight * swiglu(y, *parts)
        return out

    x = w["embed_tokens.weight"][tokens]
    for n in range(told["num_hidden_layers"]):
        y, at = norm(f"layers.{n}.input_layernorm", x), f"layers.{n}.self_attn"
        q, k, v = (
            linear(f"{at}.{part}_proj", y).unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in (("q", heads), ("k", shared), ("v", shared))
        )
        k, v = (each.repeat_interleave(heads // shared, 1) for each in (turned(k, told), v))
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = (back >= 0) & (back < (told.get("sliding_window") or q.shape[2]))
        a = functional.scaled_dot_product_attention(turned(q, told), k, v, seen)
        x = x + linear(f"{at}.o_proj", a.transpose(1, 2).flatten(2))
        y, at = norm(f"layers.{n}.post_attention_layernorm", x), f"layers.{n}.mlp"
        if "num_local_experts" in told:
            x = x + mixture(f"layers.{n}.block_sparse_moe", y)
        else:
            x = x + swiglu(y, *(f"{at}.{part}_proj" for part in ("gate", "up", "down")))
    return norm("norm", x) @ w[head].T


SCALED = "rope_theta=300.0 rope_scaling='{factor = 8, low = 1, high = 4, original = 8}'"


@pytest.mark.parametrize(
    "model",
    [
        "kind=llama kv_heads=4 ffn=60",
        "kind=qwen2 kv_heads=4",
        f"{MIXTRAL} kv_heads=4 sequence=23",
        "kind=llama kv_heads=4 sequence=23 window=4",
        f"{MIXTRAL} experts=5 top_k=3 tied=false {SCALED}",
        f"kind=llama heads=3 hidden=36 sequence=23 tied=false norm_epsilon=0.01 {SCALED}",
    ],
)
def test_exported_llama_has_the_same_logits_in_torch(tmp_path, model):
    target = exported(tmp_path, f"{SERIAL} {model}")
    told = json.loads((target / "config.json").read_text())
    tokens = drawn_models.tokens_of(told["vocab_size"], told["max_position_embeddings"])
    found = drawn_models.logits(tmp_path / "run" / "checkpoints" / "step-00000000", tokens)
    expected = their_llama(load_file(target / "model.safetensors"), told, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(found).max() > 0.1


def their_bert(weights, told, tokens):
    """BERT in torch, with the names and the layout of Hugging Face."""
    heads, gelu = told["num_attention_heads"], {"gelu_new": "tanh", "gelu": "none"}
    w = {name.removeprefix("bert."): torch.tensor(a) for name, a in weights.items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        weight, bias = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, told["layer_norm_eps"])

    def activation(x):
        return functional.gelu(x, approximate=gelu[told["hidden_act"]])

    table = w["embeddings.word_embeddings.weight"]
    segments = w["embeddings.token_type_embeddings.weight"]
    x = table[tokens] + w["embeddings.position_embeddings.weight"] + segments[0]
    x = norm("embeddings", x)
    for n in range(told["num_hidden_layers"]):
        at = f"encoder.layer.{n}"
        q, k, v = (
            linear(f"{at}.attention.self.{part}", x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        a = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = norm(f"{at}.attention.output", x + linear(f"{at}.attention.output.dense", a))
        up = activation(linear(f"{at}.intermediate.dense", x))
        x = norm(f"{at}.output", x + linear(f"{at}.output.dense", up))
    at = "cls.predictions"
    x = norm(f"{at}.transform", activation(linear(f"{at}.transform.dense", x)))
    if told["tie_word_embeddings"]:
        return x @ table.T + w[f"{at}.bias"]
    return x @ w[f"{at}.decoder.weight"].T + w[f"{at}.decoder.bias"]


@pytest.mark.parametrize(
    "model", ["kind=bert ffn=60", "kind=bert tied=false gelu=exact heads=3 norm_epsilon=0.01"]
)
def test_exported_bert_has_the_same_logits_in_torch(tmp_path, model):
    target = exported(tmp_path, f"{SERIAL} {model}")
    told = json.loads((target / "config.json").read_text())
    tokens = drawn_models.tokens_of(told["vocab_size"], told["max_position_embeddings"])
    found = drawn_models.logits(tmp_path / "run" / "checkpoints" / "step-00000000", tokens)
    expected = their_bert(load_file(target / "model.safetensors"), told, tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.abs(found).max() > 0.1
