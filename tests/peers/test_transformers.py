"""Weights exchanged with Hugging Face transformers: the same logits in float32."""

import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpc3d.checkpoint import main
from hpc3d.checkpoints.inspect import config_of
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.data.batches import Batches
from hpc3d.data.token_file import open_tokens
from hpc3d.generation.sampling import Sampling
from hpc3d.model.microbatch import Microbatch
from tests.checkpoints import drawn_models
from tests.mpi import ROOT, checked
from tests.peers.trained_models import in_double
from tests.runs import losses

transformers = pytest.importorskip("transformers", reason="make test-peers installs it")

pytestmark = pytest.mark.slow

MIXTRAL = "kind=llama ffn=48 experts=4 top_k=2 capacity=0 z_loss=0"
OURS = f"""
x=2 y=2 z=2 microbatches=2
p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1 tied=false gelu=exact heads=4
x=2 y=2 z=2 microbatches=2 kind=llama kv_heads=4 ffn=64
x=2 microbatches=2 kind=qwen2 kv_heads=6 ffn=64
x=2 y=4 microbatches=2 kind=llama kv_heads=2 ffn=64
x=2 y=2 z=2 microbatches=2 kind=bert ffn=64 heads=4
p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=1 kind=bert tied=false gelu=exact dropout=0.25
p=2 d=2 microbatches=2 zero=1 schedule=1f1b kind=llama tied=false norm_epsilon=0.01 rope_theta=50.0
schedule=none microbatches=2 heads=1 sequence=11 layers=1 vocabulary=50 dropout=0.25
y=3 microbatches=2 heads=3 hidden=48 sequence=64 batch=6
d=2 e=2 x=2 zero=1 microbatches=2 {MIXTRAL} kv_heads=4
p=2 e=4 y=2 schedule=1f1b microbatches=3 {MIXTRAL} top_k=3 tied=false norm_epsilon=0.01
c=2 x=2 microbatches=2 kind=llama kv_heads=4 ffn=64 sequence=12 window=3
x=2 microbatches=2 kind=phi3 kv_heads=4 ffn=64
x=2 microbatches=2 kind=gemma3_text kv_heads=4 ffn=64
x=2 microbatches=2 kind=gemma3_text kv_heads=4 ffn=64 window=3 global_every=2
x=2 microbatches=2 kind=roberta ffn=64 heads=4 gelu=exact
""".strip().splitlines()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
THEIRS = [
    {},
    {"n_head": 1, "n_layer": 1, "activation_function": "gelu"},
    {"tie_word_embeddings": False, "n_head": 8, "activation_function": "gelu_pytorch_tanh"},
    {"kind": "llama"},
    {"kind": "llama", "num_key_value_heads": 6, "tie_word_embeddings": True, "rms_norm_eps": 0.1},
    {"kind": "llama", "rope_parameters": LLAMA3},
    {"kind": "mistral", "num_attention_heads": 4},
    {"kind": "mistral", "sliding_window": 5},
    {"kind": "mixtral", "sliding_window": 3},
    {"kind": "qwen2"},
    {"kind": "mixtral"},
    {"kind": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3, "rope_theta": 50.0},
    {"kind": "bert"},
    {"kind": "bert", "tie_word_embeddings": False, "hidden_act": "gelu_new", "vocab_size": 50},
    {"vocab_size": 50, "n_positions": 64, "n_embd": 48, "n_head": 3, "n_inner": 192},
]
SMALL = {
    "n_layer": 3,
    "n_embd": 24,
    "n_head": 4,
    "n_positions": 7,
    "vocab_size": 29,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_LLAMA = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 19,
    "vocab_size": 29,
}
SMALL_BERT = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "max_position_embeddings": 19,
    "vocab_size": 29,
}
OF_KIND = {
    "bert": SMALL_BERT,
    "gpt2": SMALL,
    "llama": SMALL_LLAMA,
    "mistral": {**SMALL_LLAMA, "sliding_window": None},
    "mixtral": {**SMALL_LLAMA, "num_local_experts": 4, "sliding_window": None},
    "phi3": {**SMALL_LLAMA, "pad_token_id": None},
    "qwen2": SMALL_LLAMA,
}


def command(*words):
    assert main([str(word) for word in words]) == 0


def logits(model, tokens):
    """Return the logits of a model of transformers, without dropout."""
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def same(found, expected):
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def auto(kind):
    """Return the Auto class of transformers for a kind of model."""
    masked, causal = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    return masked if kind in ("bert", "roberta") else causal


def theirs(seed=4, kind="gpt2", **settings):
    """Return a model of transformers with random numbers, which are small enough that float32 is
    within 1e-5 of float64."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**OF_KIND[kind], **settings})
    model = auto(kind).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("line", OURS)
def test_transformers_loads_the_export_with_the_same_logits(tmp_path, line):
    folder = drawn_models.saved(tmp_path / "run", f"{line} dtype=float32")
    config = config_of(Checkpoint(folder)).model
    command("export", folder, "-o", tmp_path / "out")
    model, report = auto(config.kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    told = model.config
    kind = "mistral" if config.window and config.kind == "llama" else config.kind
    assert told.model_type == ("mixtral" if config.experts else kind)
    if config.kind == "gpt2":
        assert told.attn_pdrop == told.embd_pdrop == told.resid_pdrop == config.dropout
    assert told.tie_word_embeddings == config.tied
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == config.tied
    assert model.dtype == torch.float32
    tokens = drawn_models.tokens_of(config.vocabulary, config.sequence)
    same(drawn_models.logits(folder, tokens), logits(model, tokens))


@pytest.mark.parametrize("settings", THEIRS)
def test_saved_transformers_model_is_imported_with_the_same_logits(tmp_path, settings):
    model = theirs(**settings)
    model.save_pretrained(tmp_path / "out")
    command("import", tmp_path / "out", "-o", tmp_path / "run")
    told = model.config
    folder = tmp_path / "run" / "checkpoints" / "step-00000000"
    found = config_of(Checkpoint(folder)).model
    rate = getattr(told, "hidden_dropout_prob", getattr(told, "resid_pdrop", 0))
    assert found.dropout == rate
    tokens = drawn_models.tokens_of(told.vocab_size, found.sequence)
    same(drawn_models.logits(folder, tokens), logits(model, tokens))


def test_bfloat16_shards_are_imported_with_the_same_logits(tmp_path):
    """Large models are often published as bfloat16 shards."""
    model = theirs(tie_word_embeddings=False).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "out", max_shard_size="4KB")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 1
    command("import", tmp_path / "out", "-o", tmp_path / "run")
    tokens = drawn_models.tokens_of(29, 7)
    folder = tmp_path / "run" / "checkpoints" / "step-00000000"
    same(drawn_models.logits(folder, tokens), logits(model.float(), tokens))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "llama", "rope_parameters": LLAMA3},
        {"kind": "mixtral", "router_aux_loss_coef": 0.03},
        {"kind": "bert", "hidden_act": "gelu_new"},
    ],
)
def test_import_and_export_preserve_every_bit(tmp_path, settings):
    before = theirs(**settings)
    before.save_pretrained(tmp_path / "out")
    command("import", tmp_path / "out", "-o", tmp_path / "run")
    command("export", tmp_path / "run", "-o", tmp_path / "back")
    model = auto(settings.get("kind")).from_pretrained(tmp_path / "back")
    after = model.state_dict()
    assert after.keys() == before.state_dict().keys()
    assert all(torch.equal(after[name], array) for name, array in before.state_dict().items())
    assert model.config.num_attention_heads == before.config.num_attention_heads


LIKE_GPT2 = {"vocab_size": 256, "n_positions": 16, "n_embd": 48, "n_head": 8}
LIKE_GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
LIKE_MIXTRAL = {"kind": "mixtral", "vocab_size": 256, "max_position_embeddings": 16}
LIKE_MIXTRAL |= {"num_hidden_layers": 2, "router_aux_loss_coef": 0.0}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (LIKE_GPT2, "p 2 d 2 zero 1"),
        (LIKE_MIXTRAL, "p 2 e 2 zero 0"),
        (LIKE_MIXTRAL, "d 2 e 4 zero 3"),
    ],
)
def test_resumed_import_has_the_loss_of_transformers(tmp_path, settings, layout):
    """The first step on 8 ranks has the loss that transformers computes for its batch."""
    model = theirs(**settings)
    model.save_pretrained(tmp_path / "out")
    command("import", tmp_path / "out", "-o", tmp_path / "run", "--train.batch", 48)
    axes, zero = layout.split(" zero ")
    sizes = re.findall(r"(\w) (\d)", axes)
    mesh = [word for axis, size in sizes for word in (f"--mesh.{axis}", size)]
    parallel = ["--parallel.zero", zero, "--parallel.microbatches", 2]
    resume = ["-m", "hpc3d.train", "--resume", tmp_path / "run", "--train.steps", 1]
    checked(8, *resume, *mesh, *parallel)
    with open_tokens(ROOT / "inputs" / "corpus", "byte") as tokens:
        batch, targets = Batches(tokens, 16, 48, seed=1234).batch(0)
    found = torch.from_numpy(logits(model, batch.astype(np.int64))).flatten(0, 1)
    expected = functional.cross_entropy(found, torch.from_numpy(targets).flatten().long())
    assert losses(tmp_path / "run")[0] == pytest.approx(expected.item(), rel=1e-5)


def test_transformers_generates_from_the_export(tmp_path):
    folder = drawn_models.saved(
        tmp_path / "run", "schedule=none microbatches=2 sequence=11 dtype=float32"
    )
    command("export", folder, "-o", tmp_path / "out")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    start = torch.tensor([[3, 5, 7]])
    made = model.generate(start, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 11) and made[:, :3].equal(start)


@pytest.mark.parametrize(
    "settings", [{"n_positions": 40}, {"kind": "llama"}, {"kind": "qwen2"}, {"kind": "mixtral"}]
)
def test_greedy_generation_matches_transformers(tmp_path, settings):
    """The model of transformers has a vocabulary of 256 bytes, and three queries per key."""
    model = theirs(**settings, vocab_size=256).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    room = model.config.max_position_embeddings
    prompt = b"The"
    count = room - len(prompt)
    model.save_pretrained(tmp_path / "out")
    ids = torch.tensor([[*prompt]])
    with torch.no_grad():
        given = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    expected = given[0, len(prompt) :].tolist()
    for ranks, how in ((1, []), (4, ["--mesh.x", 2, "--mesh.y", 2, "--parallel.scheme", "2d"])):
        words = [tmp_path / "out", "--prompt", "The", "--tokens", count, "--temperature", 0]
        printed = checked(ranks, "-m", "hpc3d.generate", *words, "--json", *how)
        (sample,) = json.loads(printed.splitlines()[-1])["samples"]
        assert sample["tokens"] == expected


@pytest.mark.parametrize(
    "settings", [{"n_positions": 40}, {"kind": "llama"}, {"kind": "qwen2"}, {"kind": "phi3"}]
)
def test_evaluation_matches_transformers(tmp_path, settings):
    """Tests an imported run on 4 ranks, and the model folder on one rank, in float64."""
    text = "the cat sat on the mat; größer\n" * 9
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokens, loss = torch.tensor([[*text.encode(), 0]]), 0.0
    with in_double(), torch.no_grad():
        model = theirs(**settings, vocab_size=256).double().eval()
        room = model.config.max_position_embeddings
        for start in range(0, tokens.shape[1] - 1, room):
            window = tokens[:, start : start + room + 1]
            found = model(window[:, :-1]).logits[0]
            loss += functional.cross_entropy(found, window[0, 1:], reduction="sum").item()
    model.save_pretrained(tmp_path / "out")
    command("import", tmp_path / "out", "-o", tmp_path / "run")
    layout = ["--mesh.x", 2, "--mesh.y", 2, "--parallel.scheme", "2d"]
    for ranks, path, how in ((4, "run", layout), (1, "out", [])):
        words = [tmp_path / path, "--data", tmp_path / "text.txt", "--json", *how]
        printed = checked(ranks, "-m", "hpc3d.evaluate", *words)
        (row,) = json.loads(printed.splitlines()[-1])["files"]
        assert row["tokens"] == tokens.shape[1] - 1
        assert row["loss"] == pytest.approx(loss / row["tokens"], rel=1e-10)


def test_balance_loss_of_one_layer_matches_transformers(tmp_path):
    """With several layers, transformers multiplies means over all layers, unlike hpc3d."""
    model = theirs(kind="mixtral", num_hidden_layers=1, router_aux_loss_coef=0.3)
    model.save_pretrained(tmp_path / "out")
    command("import", tmp_path / "out", "-o", tmp_path / "run")
    ours = drawn_models.model_of(tmp_path / "run" / "checkpoints" / "step-00000000")
    tokens = drawn_models.tokens_of(29, 19, sequences=1)
    ours.stage.forward(None, Microbatch(0, 0, tokens, tokens, 1.0))
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(tokens), output_router_logits=True).aux_loss
    expected = 0.3 * found.item()
    assert ours.stage.auxiliary_loss / tokens.size == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 20, 0.9), (1.5, 300, 0.5), (1.0, 7, 0.0)]
)
def test_sampling_probabilities_match_transformers(temperature, top_k, top_p):
    scores = torch.randn((1, 100), generator=torch.manual_seed(3), dtype=torch.float64)
    expected = scores
    for name, value in [("Temperature", temperature), ("TopK", top_k), ("TopP", top_p)]:
        expected = getattr(transformers, f"{name}LogitsWarper")(value)(None, expected)
    expected = expected.softmax(1)[0].numpy()
    found = Sampling(temperature, top_k, top_p).probabilities(scores[0].numpy())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def nano_logits(weights, heads, tokens):
    """Return the logits of nanoGPT (model.py) for the weights in its checkpoint."""

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"]
    layer = 0
    while (block := f"transformer.h.{layer}") + ".ln_1.weight" in weights:
        parts = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{block}.attn.c_proj")
        hidden = functional.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x, layer = x + linear(hidden, f"{block}.mlp.c_proj"), layer + 1
    return linear(norm(x, "transformer.ln_f"), "lm_head").numpy()


def nano_weights(sizes):
    """Return random weights with the names and shapes of nanoGPT's."""
    width, hidden = sizes["n_embd"], 4 * sizes["n_embd"]
    shapes = {"transformer.wte": (29, width), "transformer.wpe": (sizes["block_size"], width)}
    for block in (f"transformer.h.{layer}" for layer in range(sizes["n_layer"])):
        shapes |= {f"{block}.ln_1": (width,), f"{block}.ln_2": (width,)}
        shapes |= {f"{block}.attn.c_attn": (3 * width, width)}
        shapes |= {f"{block}.attn.c_proj": (width, width)}
        shapes |= {f"{block}.mlp.c_fc": (hidden, width), f"{block}.mlp.c_proj": (width, hidden)}
    shapes |= {"transformer.ln_f": (width,)}
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    if sizes["bias"]:
        biased = (each for each in shapes.items() if not each[0].endswith(("wte", "wpe")))
        weights |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in biased}
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}


@pytest.mark.parametrize("bias", [True, False])
def test_documented_lines_convert_a_checkpoint_of_nanogpt(bias, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n([^`]*ckpt\.pt.*?)```", page, re.DOTALL)
    assert lines.count("\n") <= 12
    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 7, "vocab_size": 29}
    sizes |= {"bias": bias, "dropout": 0.25}
    weights = nano_weights(sizes)
    stored = {f"_orig_mod.{name}": value for name, value in weights.items()}
    torch.save({"model": stored, "model_args": sizes, "iter_num": 9}, "ckpt.pt")
    exec(compile(lines, "docs/hugging-face.md", "exec"), {})
    tokens = drawn_models.tokens_of(29, 7)
    expected = nano_logits(weights, 3, torch.from_numpy(tokens))
    same(logits(transformers.AutoModelForCausalLM.from_pretrained("FOLDER"), tokens), expected)
    command("import", "FOLDER", "-o", "run", "--model.dropout", "0.25")
    (step,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    same(drawn_models.logits(step, tokens), expected)
