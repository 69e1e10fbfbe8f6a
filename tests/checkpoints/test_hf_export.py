"""Export to Hugging Face format and import from it preserve every bit, for any layout."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hpc3d.checkpoints.hf_export import export, notes
from hpc3d.checkpoints.hf_import import Pretrained, configured
from hpc3d.checkpoints.inspect import config_of, problems
from hpc3d.checkpoints.new_run import begin
from hpc3d.checkpoints.sharded import Checkpoint
from tests.checkpoints import drawn_models
from tests.strided import strided

LAYOUTS = """
x=2 y=2 z=2 microbatches=2
x=4 scheme=1d microbatches=2
x=2 y=2 z=2 scheme=3d-broadcast microbatches=2
p=2 d=2 x=2 schedule=zb-v chunks=2 microbatches=2 zero=1
d=3 y=3 zero=3 microbatches=2
""".strip().splitlines()
MIXTRAL = "kind=llama ffn=48 experts=4 top_k=2 capacity=0 z_loss=0"
MODELS = f"""
dtype=float64
tied=false gelu=exact dropout=0.25
dtype=float32
kind=llama kv_heads=4 ffn=60
kind=llama kv_heads=12 ffn=96 tied=false norm_epsilon=1e-6 rope_theta=5e5 dropout=0.25
kind=bert ffn=60
kind=bert ffn=96 tied=false gelu=exact norm_epsilon=0.01 dropout=0.25
{MIXTRAL} kv_heads=12 balance_loss=0.02
{MIXTRAL} tied=false kv_heads=4 experts=6 top_k=3 rope_theta=50.0 norm_epsilon=1e-6 dtype=float32
{MIXTRAL} kind=qwen3 kv_heads=4 moe_every=2 balance_loss=0.02 window=2
""".strip().splitlines()
SERIAL = "schedule=none microbatches=2"


def exported(folder, line, step=0):
    """Export a checkpoint of a mix; return the folder."""
    target = folder / "exported"
    export(Checkpoint(drawn_models.saved(folder / "run", line, step)), target)
    return target


def imported(source, folder, *words):
    """Return the first checkpoint of a run that starts from imported weights."""
    pretrained = Pretrained(source)
    begin(folder, configured(pretrained, words), pretrained.parameter)
    return folder / "checkpoints" / "step-00000000"


@pytest.mark.parametrize("line", strided(LAYOUTS, 3))
def test_every_layout_exports_the_same_bytes(tmp_path, line):
    expected = exported(tmp_path / "serial", SERIAL)
    found = exported(tmp_path / "parallel", line)
    for name in ("model.safetensors", "config.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


EXPERTS = """
e=2 d=2 x=2 zero=1 microbatches=2
p=2 e=4 y=2 schedule=1f1b microbatches=3
e=2 x=2 y=2 z=2 microbatches=3
e=4 d=2 microbatches=2 zero=3
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(EXPERTS, 4))
def test_every_expert_layout_exports_the_same_bytes(tmp_path, line):
    expected = exported(tmp_path / "serial", f"{SERIAL} {MIXTRAL}")
    found = exported(tmp_path / "parallel", f"{line} {MIXTRAL}")
    for name in ("model.safetensors", "config.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "kind=gpt2 experts=4 top_k=2",
            "kind = gpt2 with experts has no counterpart in transformers",
        ),
        (
            "window=2",
            "window = 2: GPT2LMHeadModel .*kind = gemma2, gemma3_text, llama, phi3, qwen2, qwen3 ",
        ),
        (
            "kind=llama window=2 global_every=2",
            "global_every = 2: MistralForCausalLM .*kind = gemma2, gemma3_text, qwen2, qwen3 ",
        ),
        ("kind=llama window=2 mlp_bias=true", "window = 2: LlamaForCausalLM in transformers"),
        (
            "kind=qwen3 experts=4 top_k=2 capacity=0 window=2 global_every=2",
            "global_every = 2: Qwen3MoeForCausalLM",
        ),
        (f"{MIXTRAL} shared_experts=1", "shared_experts = 1: Mixtral has no shared experts"),
        (f"{MIXTRAL} moe_every=2", "moe_every = 2: Mixtral has experts in every block"),
        (f"{MIXTRAL} balance_bias=0.01", "balance_bias = 0.01: Mixtral has no router bias"),
        (
            "kind=phi3 rope_scaling='{type = \"linear\", factor = 2}'",
            "rope_scaling has the type lin",
        ),
        ("kind=roberta gelu=tanh", "gelu = tanh: the head of RoBERTa has the exact GELU"),
        (f"{MIXTRAL} top_k=1", "top_k = 1: Mixtral gives a single expert the gate weight 1"),
    ],
)
def test_models_without_a_transformers_equivalent_are_rejected(tmp_path, line, said):
    with pytest.raises(ValueError, match=rf"^model\.{said}"):
        exported(tmp_path, f"{SERIAL} {line}")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            f"{MIXTRAL} capacity=1.5",
            ["model.capacity = 1.5: MixtralForCausalLM has no capacity limit"],
        ),
        (MIXTRAL, []),
        ("kind=llama", []),
    ],
)
def test_export_notes_that_a_mixtral_never_drops_tokens(tmp_path, line, said):
    found = notes(Checkpoint(drawn_models.saved(tmp_path / "run", f"{SERIAL} {line}")))
    assert [text.partition(" and ")[0] for text in found] == said


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")]
)
def test_export_rounds_to_a_dtype_as_torch(tmp_path, dtype, stored):
    step = Checkpoint(
        drawn_models.saved(tmp_path / "run", f"{SERIAL} kind=llama dtype=float32", 0)
    )
    exact = export(step, tmp_path / "exact")
    export(step, tmp_path / "rounded", dtype=dtype)
    read = load_file(tmp_path / "rounded" / "model.safetensors")
    assert exact.keys() == read.keys()
    for name, value in exact.items():
        assert torch.equal(read[name], torch.from_numpy(value).to(getattr(torch, dtype)))
    entries = Pretrained(tmp_path / "rounded").entries.values()
    assert {entry.dtype for entry in entries} == {stored}
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == dtype
    back = Checkpoint(imported(tmp_path / "rounded", tmp_path / "back"))
    export(back, tmp_path / "again", dtype=dtype)
    weights = [tmp_path / name / "model.safetensors" for name in ("rounded", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_values_beyond_the_range_of_the_exported_dtype_are_rejected(tmp_path, monkeypatch):
    step = Checkpoint(drawn_models.saved(tmp_path / "run", SERIAL, 0))
    monkeypatch.setattr(Checkpoint, "fill", lambda self, array, *_: array.fill(1e6))
    with pytest.raises(
        ValueError, match=r"1e\+06 exceeds the range of float16; set --dtype float64"
    ):
        export(step, tmp_path / "out", dtype="float16")


def test_export_replaces_the_default_padding_token_of_transformers(tmp_path):
    """The default of Phi-3, 32000, is not in the vocabulary, and transformers then rejects it."""
    settings = json.loads((exported(tmp_path, f"{SERIAL} kind=phi3") / "config.json").read_text())
    assert settings["pad_token_id"] is None


def test_export_removes_vocabulary_padding(tmp_path):
    """There are 29 tokens on two ranks; a checkpoint has no padding."""
    expected = exported(tmp_path / "serial", f"{SERIAL} kind=bert")
    found = exported(tmp_path / "parallel", f"{LAYOUTS[0]} kind=bert")
    assert problems(tmp_path / "parallel" / "run" / "checkpoints" / "step-00000000") == []
    name = "model.safetensors"
    assert (found / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.parametrize("model", strided(MODELS, 3))
def test_exported_model_is_imported_bit_for_bit(tmp_path, model):
    target = exported(tmp_path, f"{SERIAL} {model}", step=5)
    back = imported(target, tmp_path / "back")
    assert problems(back) == []
    before = config_of(Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000005"))
    after, header = config_of(Checkpoint(back)), Checkpoint(back).header
    assert (after.model, after.train.dtype) == (before.model, before.train.dtype)
    assert (header["step"], header["updates"]) == (0, 0)
    values = drawn_models.stored(tmp_path / "run" / "checkpoints" / "step-00000005")
    found = drawn_models.stored(back)
    assert found.keys() == values.keys()
    for (name, kind), array in found.items():
        expected = values[name, kind] if kind == "value" else np.zeros_like(array)
        assert array.dtype == expected.dtype and array.tobytes() == expected.tobytes(), name
