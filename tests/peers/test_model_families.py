"""Small random models of Hugging Face transformers in float64: hpc3d has the same logits,
gradients and greedy tokens on every layout, and exports the same arrays.

docs/hugging-face.md lists the cases of CASES in a table.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from hpc3d.checkpoint import main
from hpc3d.checkpoints.hf_import import Pretrained, configured
from hpc3d.checkpoints.hf_settings import LLAMA
from hpc3d.comm.threads import run
from hpc3d.config.input_file import ModelConfig
from hpc3d.config.resolve import resolve
from hpc3d.model.decoder import Decoder
from hpc3d.ops.rotary import Rotation
from hpc3d.training.trainer import Trainer, spec_of
from tests.checkpoints import drawn_models
from tests.mpi import ROOT
from tests.peers.trained_models import in_double

transformers = pytest.importorskip("transformers", reason="make test-peers installs it")
ROPE_INIT_FUNCTIONS = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.slow

LENGTH, SEQUENCES, WORDS = 8, 4, 32
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "vocab_size": WORDS,
}
NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 5, "rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
YARN |= {"rope_theta": 50.0, "beta_fast": 0.5, "beta_slow": 0.05}
LONGROPE = {"rope_type": "longrope", "rope_theta": 50.0, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
ROBERTA = {"max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, "pad_token_id": 1}
WINDOW = {"use_sliding_window": True, "sliding_window": 3}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN3_MOE |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.0, "head_dim": 12}
GEMMA3 = {"hidden_size": 64, "head_dim": 12, "sliding_window": 3}
GEMMA3 |= {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3["rope_parameters"] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
GEMMA2 = {"hidden_size": 64, "head_dim": 12, "sliding_window": 3, "query_pre_attn_scalar": 24}
GEMMA2 |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
CASES = {  # row of the table -> type of transformers and settings
    "Llama": ("llama", {}),
    "Llama, `head_dim` of its own": ("llama", {"head_dim": 12}),
    "Llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Llama, biases, a KV head per query head": (
        "llama",
        {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 4},
    ),
    "Llama, linear RoPE scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    ),
    "Llama, dynamic RoPE scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 50.0}},
    ),
    "Llama, YaRN": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "Llama, YaRN, `mscale`": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 3.0, "mscale_all_dim": 0.5}},
    ),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "Qwen2": ("qwen2", {"use_sliding_window": False}),
    "Qwen2, sliding window": ("qwen2", WINDOW | {"max_window_layers": 0}),
    "Qwen3": ("qwen3", {"head_dim": 12}),
    "Qwen3, sliding window in the first of two layers": (
        "qwen3",
        WINDOW | {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Qwen3, a KV head per query head": (
        "qwen3",
        {"head_dim": 4, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "Qwen3-MoE": ("qwen3_moe", QWEN3_MOE),
    "Qwen3-MoE, sliding window, experts in every second layer": (
        "qwen3_moe",
        QWEN3_MOE | WINDOW | {"decoder_sparse_step": 2, "intermediate_size": 16},
    ),
    "OLMo 2": ("olmo2", {}),
    "OLMo 2, a KV head per query head": (
        "olmo2",
        {"num_key_value_heads": 4, "attention_bias": True, "head_dim": 4},
    ),
    "Gemma": ("gemma", {"hidden_size": 64, "head_dim": 12}),  # the square root of 64 is exact
    "Gemma, untied, biases": (
        "gemma",
        {"hidden_size": 16, "head_dim": 4, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "Gemma 2": ("gemma2", GEMMA2),
    "Gemma 2, no caps, no windows, untied, biases": (
        "gemma2",
        GEMMA2
        | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
        | {"layer_types": ["full_attention"] * 2, "attention_bias": True}
        | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "Gemma 3": ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 24}),
    "Gemma 3, a window in every layer, untied, biases": (
        "gemma3_text",
        GEMMA3
        | {"layer_types": ["sliding_attention"] * 2, "attention_bias": True}
        | {"tie_word_embeddings": False, "num_key_value_heads": 4, "query_pre_attn_scalar": 12},
    ),
    "BERT": ("bert", {}),
    "BERT, untied": ("bert", {"tie_word_embeddings": False}),
    "RoBERTa": ("roberta", ROBERTA),
    "RoBERTa, untied": ("roberta", ROBERTA | {"tie_word_embeddings": False}),
    "GPT-NeoX": ("gpt_neox", {"rotary_pct": 0.5}),
    "GPT-NeoX, tied, tanh approximation of GELU": (
        "gpt_neox",
        {"rotary_pct": 1.0, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    ),
    "Phi-3": ("phi3", {}),
    "Phi-3, sliding window": ("phi3", {"sliding_window": 3}),
    "Phi-3, partial rotary embedding": (
        "phi3",
        {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "Phi-3, LongRoPE, texts longer than `original`": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 2},
    ),
    "Phi-3, LongRoPE, texts of at most `original` tokens": (
        "phi3",
        {"rope_parameters": LONGROPE | {"factor": 4.0}, "sliding_window": 3}
        | {"original_max_position_embeddings": LENGTH},
    ),
}
LAYOUTS = {
    "one rank": "",
    "x=2 y=2": "--mesh.x 2 --mesh.y 2",
    "y=4": "--mesh.y 4",
    "c=2": "--mesh.c 2",
    "p=2": "--mesh.p 2 --parallel.microbatches 2",
}


@contextmanager
def exactly():
    """Let transformers compute in float64, also the frequencies of RoPE and the router."""

    def wider(function):
        def call(*args, dtype=None, **how):
            return function(*args, dtype=torch.float64 if dtype is torch.float32 else dtype, **how)

        return call

    with torch.device("meta"):
        torch.empty(0)  # PyTorch caches its constructors; the original arange must be one of them
    softmax = patch.object(functional, "softmax", wider(functional.softmax))
    with in_double(), softmax, patch.object(torch, "arange", wider(torch.arange)):
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model of transformers, and the folder to which it was saved."""
    kind, settings = CASES[request.param]
    torch.manual_seed(5)
    has_key = partial(hasattr, transformers.AutoConfig.for_model(kind))
    sizes = {key: value for key, value in SIZES.items() if has_key(key)}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **NO_TOKENS, **settings})
    with exactly():
        how = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
        masked = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
        made = masked[kind not in ("bert", "roberta")].from_config(config, **how)
        model = made.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


def batch():
    """Return tokens and targets, none of which is RoBERTa's padding token."""
    return np.random.default_rng(4).integers(2, WORDS, (2, SEQUENCES, LENGTH), np.int32)


class Fixed:
    """The same batch in every step."""

    def batch(self, step):
        return batch()


def with_weights(pretrained, config, parameters, mesh):
    for item in parameters:
        whole = pretrained.parameter(item.name, config)
        part = whole[item.layout.slices(item.shape, mesh)]
        item.value[: len(part)] = part


def resolved(pretrained, words):
    config = configured(pretrained, words.split())
    return resolve(config, prod(config.sizes().values()))


def trained(folder, words):
    """Return loss and {name: gradient} of one step of an imported model on a layout.

    A step of SGD with learning rate 1 subtracts the gradient.
    """
    pretrained = Pretrained(folder)
    step = "--train.optimizer sgd --train.learning_rate 1 --train.warmup 0 --train.clip 0 "
    step += "--train.decay constant --train.weight_decay 0 --model.dropout 0 "
    step += f"--train.batch {SEQUENCES} "
    config = resolved(pretrained, step + words)
    assert config.train.dtype == "float64"

    def rank(mesh):
        batches = Fixed() if mesh.rank == 0 else None
        trainer = Trainer(mesh, config, config.model.vocabulary, batches)
        with_weights(pretrained, config, trainer.parameters, mesh)
        before = [item.value.copy() for item in trainer.parameters]
        loss = trainer.step(0).loss
        changes = zip(trainer.parameters, before, strict=True)
        return loss, {
            item.name: (item.shape, item.layout.slices(item.shape, mesh), old - item.value)
            for item, old in changes
        }

    found = run(config.sizes(), rank)
    gradients = {}
    for _, blocks in found:
        for name, (shape, where, block) in blocks.items():
            gradients.setdefault(name, np.full(shape, np.nan))[where] = block
    return config, found[0][0], gradients


def theirs(model):
    """Return loss and {name: gradient} of a model of transformers for the batch."""
    tokens, targets = (torch.from_numpy(each.astype(np.int64)) for each in batch())
    model.zero_grad()
    with exactly():
        loss = functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
    parameters = model.named_parameters()
    gradients = {name: each.grad.numpy() for name, each in parameters if each.grad is not None}
    for name in [name for name in gradients if ".experts." in name]:  # arrays of all experts
        for number, array in enumerate(gradients.pop(name)):
            layer, _, parts = name.removesuffix("_proj").rpartition(".")
            layer, parts = f"{layer}.{number}", parts.split("_")
            for part, block in zip(parts, np.split(array, len(parts)), strict=True):
                gradients[f"{layer}.{part}_proj.weight"] = block
    return loss.item(), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_match_transformers(case, layout):
    model, folder = case
    expected, arrays = theirs(model)
    family = Pretrained(folder).family
    head = family.ends["head.table"]  # transformers renames some heads when it saves a model
    arrays = {name.replace("lm_head.weight", head): array for name, array in arrays.items()}
    arrays = {family.copies.get(name, name): array for name, array in arrays.items()}
    config, loss, gradients = trained(folder, LAYOUTS[layout])
    assert loss == pytest.approx(expected, rel=1e-9)
    found = {}
    for name, gradient in gradients.items():
        found |= family.given(name, gradient, config.model)
    found = {family.full_name_of(name): array for name, array in found.items()}
    family.join(found)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        bound = 1e-9 * max(np.abs(array).max(), 1e-3)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=bound, err_msg=name)


def test_logits_match_transformers_and_the_export_has_the_same_arrays(case, tmp_path):
    model, folder = case
    words = [folder, "-o", tmp_path / "run"]
    assert main(["import", *map(str, words)]) == 0
    tokens = 2 + drawn_models.tokens_of(WORDS - 2, LENGTH)
    found = drawn_models.logits(tmp_path / "run" / "checkpoints" / "step-00000000", tokens)
    with exactly(), torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    assert main(["export", *map(str, (tmp_path / "run", "-o", tmp_path / "back"))]) == 0
    name = "model.safetensors"
    before, after = load_file(folder / name), load_file(tmp_path / "back" / name)
    for used, other in Pretrained(folder).family.copies.items():
        before |= {other: before[used]} if used in before else {}  # transformers ignores the other
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, name)
    with exactly(), torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path / "back", dtype=torch.float64).eval()
        loaded.config._experts_implementation = model.config._experts_implementation
        again = loaded(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("layout", ["one rank", "x=2 y=2"])
def test_greedy_tokens_match_transformers(case, layout):
    model, folder = case
    if not Pretrained(folder).family.family.causal:
        pytest.skip("predicts masked tokens")
    start = batch()[0][:, :3].astype(np.int64)
    with exactly(), torch.no_grad():
        expected = model.generate(
            torch.from_numpy(start), max_new_tokens=LENGTH - 3, do_sample=False, pad_token_id=0
        )
    pretrained = Pretrained(folder)
    config = resolved(pretrained, f"--train.batch {SEQUENCES} {LAYOUTS[layout]}")

    def rank(mesh):
        spec = spec_of(config, config.model.vocabulary)
        decoder = Decoder(mesh, spec, config.train.dtype, LENGTH)
        with_weights(pretrained, config, decoder.parameters, mesh)
        tokens, new = start, start
        while tokens.shape[1] < LENGTH:
            new = np.asarray(decoder.forward(new)).argmax(1)[:, None]
            tokens = np.concatenate([tokens, new], 1)
        return tokens

    for found in run(config.sizes(), rank):
        np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("width", [4, 16, 64])
@pytest.mark.parametrize("sequence", [9, 50])
@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 3.0},
        {"type": "dynamic", "factor": 3.0, "original": 20.0},
        {"type": "llama3", "factor": 8.0, "low": 1.0, "high": 4.0, "original": 50.0},
        {"type": "yarn", "factor": 8.0, "original": 50.0},
        {"type": "yarn", "factor": 8.0, "original": 5000.0, "attention": 0.7},
        {"type": "yarn", "factor": 8.0, "original": 500.0, "fast": 9.0, "slow": 3.0},
        {"type": "longrope", "factor": 8.0, "original": 20.0},
        {"type": "longrope", "factor": 1.0, "original": 20.0, "attention": 0.7},
    ],
    ids=str,
)
def test_rope_frequencies_match_transformers(scaling, sequence, width):
    if scaling["type"] == "longrope":
        short, long = np.random.default_rng(3).integers(1, 9, (2, width // 2)).tolist()
        scaling = scaling | {"short": tuple(short), "long": tuple(long)}
    rotation = Rotation(1000.0, sequence=sequence, **scaling)
    given = ModelConfig("llama", heads=1, head_dim=width, rope_theta=1e3, rope_scaling=scaling)
    settings = LLAMA.of(replace(given, sequence=20, hidden=width, vocabulary=9, norm_epsilon=1e-5))
    config = transformers.LlamaConfig(**settings)
    with exactly():
        init = ROPE_INIT_FUNCTIONS[scaling["type"]]
        found, amplitude = init(config, seq_len=sequence)
    np.testing.assert_allclose(rotation.frequencies(width), found.numpy(), rtol=1e-12)
    assert rotation.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_table_in_the_docs_lists_the_cases():
    lines = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8").splitlines()
    first = lines.index("| Family | logits | gradients | greedy tokens | export |") + 2
    rows = lines[first : first + len(CASES) + 1]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[:-1]] == [*CASES]
    assert not rows[-1].startswith("|")
