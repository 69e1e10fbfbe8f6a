"""Import of weights in the format of Hugging Face transformers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from hpc3d.checkpoints.hf_import import Pretrained, configured
from hpc3d.checkpoints.hf_settings import GPT2
from hpc3d.checkpoints.inspect import config_of
from hpc3d.checkpoints.resume import mismatch
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.generation.trained_model import find_weights
from tests.checkpoints import drawn_models
from tests.checkpoints.test_hf_export import MIXTRAL, SERIAL, exported, imported
from tests.elided import elided

DIVERGED = np.array([1] * 22 + [np.nan, np.inf], "f4")


@pytest.fixture
def files(tmp_path):
    """Folder of a GPT-2, and a function that changes its arrays and config.json."""
    target = exported(tmp_path, f"{SERIAL} dtype=float32")

    def change(rename=str, told=None, **arrays):
        weights = load_file(target / "model.safetensors")
        weights = {rename(name): array for name, array in weights.items()} | arrays
        weights = {name: array for name, array in weights.items() if array is not None}
        save_file(weights, target / "model.safetensors")
        before = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(before | (told or {})))
        return target

    return change


def values(folder):
    return {
        name: array
        for (name, kind), array in drawn_models.stored(folder).items()
        if kind == "value"
    }


def test_import_accepts_names_without_prefix_masks_and_a_tied_head(files, tmp_path):
    """The first GPT-2 files and those of old versions have such names."""
    plain = values(imported(files(), tmp_path / "plain"))
    table = load_file(files() / "model.safetensors")["transformer.wte.weight"]
    mask = {"h.0.attn.bias": np.tri(3, dtype=bool), "h.1.attn.masked_bias": np.float32([-1e4])}
    source = files(lambda name: name.removeprefix("transformer."), **mask)
    files(**{"lm_head.weight": table})
    found = values(imported(source, tmp_path / "other"))
    assert found.keys() == plain.keys()
    assert all((found[name] == array).all() for name, array in plain.items())


def test_import_reads_sharded_files_through_the_index(files, tmp_path):
    source = files()
    plain = values(imported(source, tmp_path / "plain"))
    weights = [*load_file(source / "model.safetensors").items()]
    for number, part in enumerate((weights[:9], weights[9:])):
        save_file(dict(part), source / f"model-{number}.safetensors")
    (source / "model.safetensors").unlink()
    where = {name: f"model-{int(n >= 9)}.safetensors" for n, (name, _) in enumerate(weights)}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    found = values(imported(source, tmp_path / "other"))
    assert all((found[name] == array).all() for name, array in plain.items())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(where, "../model-0.safetensors")}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: weight_map "):
        Pretrained(source)


def test_float16_weights_are_widened_to_float32(files, tmp_path):
    norm = np.linspace(-2, 2, 24).astype("f2")
    source = files(**{"transformer.ln_f.weight": norm})
    found = values(imported(source, tmp_path / "back"))["head.norm.gamma"]
    assert found.dtype == np.float32 and (found == norm).all()


def test_safetensors_file_without_config_requires_only_the_head_count(files, tmp_path):
    source = files()
    (source / "config.json").unlink()
    alone = source / "model.safetensors"
    with pytest.raises(ValueError, match=r" config\.json .* n_head; .* --model\.heads$"):
        configured(Pretrained(alone), [])
    back = imported(alone, tmp_path / "back", "--model.heads", "12")
    assert config_of(Checkpoint(back)).model.heads == 12
    expected = drawn_models.stored(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert all((array == expected[name, "value"]).all() for name, array in values(back).items())


def test_import_with_a_shorter_sequence_keeps_the_first_positions(files, tmp_path):
    back = imported(files(), tmp_path / "back", "--model.sequence", "2")
    positions = values(back)["embedding.position"]
    expected = drawn_models.stored(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert positions.size == 2 * 24
    assert (positions == expected["embedding.position", "value"][: 2 * 24]).all()


@pytest.mark.parametrize(("kind", "free"), [("gpt2", False), ("llama", True)])
def test_sequence_may_be_shortened_only_at_step_0_without_learned_positions(kind, free, tmp_path):
    """Only the sequence length of an untrained model without a position table may be reduced."""
    line = f"kind={kind} layers=1 sequence=6"
    drawn_models.saved(tmp_path, line, 0)
    opened = Checkpoint(tmp_path / "checkpoints" / "step-00000000")
    assert mismatch(config_of(opened), opened) is None
    for sequence, good in [(3, free), (9, False)]:
        config = config_of(opened)
        config = replace(config, model=replace(config.model, sequence=sequence))
        assert (mismatch(config, opened) is None) == good
    opened.header["step"] = 1
    assert mismatch(replace(config, model=replace(config.model, sequence=3)), opened)


SQUARE = np.ones((24, 24), "f4")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"h.0.ln_1.bias": None}, "'h.0.ln_1.bias'$"),
        (
            {"h.1.ln_1.bias": None, "h.1.ln_2.bias": None},
            "'h.1.ln_1.bias', 'h.1.ln_2.bias'",
        ),
        ({"h.7.ln_1.bias": np.ones(24, "f4")}, "n_layer = 4, .* 5"),
        ({"score.weight": SQUARE}, "GPT2LMHeadModel has no 'score.weight'"),
        ({"wte.weight": None}, " wte.weight .* GPT2"),
        ({"wpe.weight": np.ones(24, "f4")}, " wpe.weight .* GPT2"),
        ({"h.0.mlp.c_fc.weight": SQUARE}, r"h.0.mlp.c_fc.weight .* \[24, 24\], .* \[24, 96\]"),
        (
            {"lm_head.weight": SQUARE},
            "lm_head.weight .* wte.weight, .* tie_word_embeddings ",
        ),
        ({"ln_f.bias": np.ones(24, "i8")}, "ln_f.bias' .* 'I64'"),
        (
            {"ln_f.bias": DIVERGED},
            "^transformer.ln_f.bias: 2 of 24 .* python -m hpc3d.checkpoint import /.* "
            "-o RUN_DIR --allow-nonfinite$",
        ),
    ],
)
def test_missing_or_unknown_arrays_are_rejected(files, tmp_path, arrays, said):
    head = "lm_head.weight", "score.weight"
    source = files(
        **{name if name in head else f"transformer.{name}": a for name, a in arrays.items()}
    )
    with pytest.raises(ValueError, match=said):
        imported(source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_message_for_a_model_of_the_hub_shows_how_to_download_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    last = name.split("/")[-1]
    line = f"models are not downloaded. ... hf download {name} --local-dir {last}, then use {last}"
    for opening in (Pretrained, lambda path: find_weights("generate", path, [])):
        with pytest.raises(ValueError, match=elided(f"{name}: ... {line}") + "$"):
            opening(Path(name))
    Path("mine").mkdir()
    for other in (tmp_path / name, "a.safetensors", "a.pt", "mine/a", ".."):
        with pytest.raises(ValueError) as refused:
            Pretrained(Path(other))
        assert "downloaded" not in str(refused.value)


def test_hf_cache_folder_error_names_the_snapshot(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"use its snapshot {snapshot}$"):
        Pretrained(tmp_path / "models--a--b")


def test_adapter_must_be_merged_into_its_model(files, tmp_path):
    weights, adapter = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    weights.write_bytes((files() / "model.safetensors").read_bytes())
    adapter.write_text("{}")
    for path in (tmp_path, weights):
        for opening in (Pretrained, lambda path: find_weights("evaluate", path, [])):
            with pytest.raises(ValueError, match=r"this is an adapter.* merge_and_unload\(\)"):
                opening(path)
    (files() / adapter.name).write_text("{}")
    assert Pretrained(files()).model  # the folder contains a merged model


def test_non_finite_weights_are_accepted_on_request(files):
    source = files(**{"transformer.ln_f.bias": DIVERGED})
    found = Pretrained(source, allow_nonfinite=True).read("ln_f.bias")
    np.testing.assert_array_equal(found, DIVERGED)


@pytest.mark.parametrize(
    ("stored", "value", "dtype", "wide"),
    [
        ("f8", -1e300, "float32", "float64"),
        ("f8", 1e300, "bfloat16", "float64"),
        ("f4", 70000, "float16", "float32"),
        ("f4", 3.4e38, "bfloat16", "float32"),
    ],
)
def test_weights_beyond_the_range_of_the_type_are_refused(
    files, tmp_path, stored, value, dtype, wide
):
    """They would become infinite; the largest numbers of a type are accepted."""
    norm = np.array([1, np.finfo(stored).tiny] * 11 + [0, value], stored)
    source = files(**{"transformer.ln_f.bias": norm})
    with pytest.raises(ValueError) as refused:
        imported(source, tmp_path / "back", "--train.dtype", dtype)
    assert str(refused.value) == (
        f"transformer.ln_f.bias: {value:g} exceeds the range of {dtype}; set --train.dtype "
        f"{wide}, the type of the stored values"
    )
    assert not (tmp_path / "back").exists()
    found = values(imported(source, tmp_path / "wide", "--train.dtype", wide))
    assert found["head.norm.beta"].tolist() == norm.tolist()


def test_a_tied_table_that_is_not_finite_is_still_tied(files):
    weights = load_file(files() / "model.safetensors")
    table = weights["transformer.wte.weight"]
    table[0] = np.nan
    source = files(**{"transformer.wte.weight": table, "lm_head.weight": table.copy()})
    assert Pretrained(source, allow_nonfinite=True).model["tied"]


def test_run_of_hpc3d_needs_no_import(tmp_path):
    exported(tmp_path, SERIAL)
    (checkpoint,) = tmp_path.glob("**/step-????????")
    run = checkpoint.parents[1]
    (run / "config.toml").touch()
    for path, what in ((run, "run"), (checkpoint, "checkpoint")):
        line = f"{path}: a {what} of hpc3d, ... python -m hpc3d.train --resume {run}"
        with pytest.raises(ValueError, match=elided(line)):
            Pretrained(path)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"model_type": "bloom"}, "model_type = 'bloom' is not .* gpt2, gpt_neox, .*, mistral"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            r"'gemma3' is not supported; save its text model, gemma3_text, .*language_model\.save",
        ),
        (
            {"architectures": ["GPT2ForSequenceClassification"]},
            r"config.json: GPT2ForSequence.* another task.*: GPT2LMHeadModel\.from_pretrained\(",
        ),
        ({"model_type": "llama"}, "matrix embed_tokens.weight is missing, .* belong to a Llama"),
        ({"rope_alpha": 2.0}, "rope_alpha = 2.0 is unknown"),
        ({"activation_function": "relu"}, "activation_function = 'relu' is not .* gelu_new"),
        ({"activation_function": ["gelu"]}, "activation_function"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ({"n_inner": 100}, "n_inner = 100: .* 4 n_embd"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"n_layer": 10**9}, "n_layer = 1000000000, .* 4"),
        ({"vocab_size": None}, "vocab_size = null, .* 29"),
        ({"n_head": 5}, "model.hidden = 24 .* model.heads = 5"),
        ({"n_head": 0}, "model.heads = 0: .* 1 "),
        ({"n_head": "4"}, "model.heads: .* '4'"),
        ({"tie_word_embeddings": "no"}, "model.tied: .* 'no'"),
        ({"tie_word_embeddings": False}, "lacks 'lm_head.weight'; save .* as a GPT2LMHeadModel$"),
        ({"resid_pdrop": 0.5}, "resid_pdrop .* 0.5.*; .* --model.dropout$"),
        (dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 1.5), "model.dropout = 1.5"),
        (
            dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), float("nan")),
            "model.dropout = nan",
        ),
    ],
)
def test_unsupported_hf_models_are_rejected(files, tmp_path, told, said):
    with pytest.raises(ValueError, match=said):
        imported(files(told=told), tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the config.json of a Llama."""
    target = exported(tmp_path_factory.mktemp("llama"), f"{SERIAL} kind=llama kv_heads=4")
    return target / "config.json"


def test_key_projection_shape_must_match_the_kv_heads(llama, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(llama.parent, source)
    told = json.loads(llama.read_text()) | {"num_key_value_heads": 6}
    (source / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"k_proj.weight is \[8, 24\], .* \[12, 24\]"):
        imported(source, tmp_path / "back")


def test_llama_without_a_configuration_is_rejected(llama, tmp_path):
    shutil.copy(llama.parent / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"config.json is missing or .* num_attention_h"):
        Pretrained(tmp_path / "model.safetensors")


STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


KEYS = [*GPT2.fixed, *GPT2.sizes, *GPT2.dropouts, *GPT2.others, "tie_word_embeddings", "any"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("strange"), f"{SERIAL} dtype=float32")


@given(st.dictionaries(st.sampled_from(KEYS), STRANGE, max_size=3))
@example({"resid_pdrop": "\x1e"})
def test_any_config_json_is_accepted_or_rejected_with_one_line_per_problem(folder, strange):
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | strange))
    try:
        model = configured(Pretrained(folder), []).model
    except ValueError as error:
        assert len(str(error).splitlines()) <= len(strange)
    else:
        assert (model.layers, model.hidden, model.sequence) == (4, 24, 3)
    finally:
        path.write_text(before)


def test_pretrained_model_has_a_learning_rate_for_fine_tuning_by_default(files):
    source = Pretrained(files())
    assert configured(source, []).train.learning_rate == 2e-5
    assert configured(source, ["--train.learning_rate", "1e-4"]).train.learning_rate == 1e-4


@pytest.mark.parametrize(("words", "name"), [([], "llama"), (["--name", "a"], "a")])
def test_imported_run_is_named_after_its_model_family(llama, words, name):
    """Otherwise, the first training reports a changed name, because it resolves the name."""
    assert configured(Pretrained(llama.parent), words).name == name


def test_dropout_comes_from_config_json_or_the_command_line(files):
    source = files(told=dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5))
    assert configured(Pretrained(source), []).model.dropout == 0.5
    files(told={"attn_pdrop": 0.1})
    assert configured(Pretrained(source), ["--model.dropout", "0.25"]).model.dropout == 0.25


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.layers", "3"], "--model.layers 3: .* has 4;"),
        (["--model.sequence", "4"], "--model.sequence 4: .* has 3;"),
        (["--model.sequence", "0"], "model.sequence = 0: .* 1"),
        (["--model.tied", "false"], "--model.tied false: .* has true;"),
        (["--train.dtype", "float8"], "train.dtype: .* 'float16', .* 'float8'"),
        (["--mesh.x", "7"], "train.batch.* mesh.x = 7"),
        (["--modl.heads", "3"], "modl: .* model[?]"),
    ],
)
def test_options_that_contradict_the_weights_are_rejected(files, words, said):
    with pytest.raises(ValueError, match=said):
        configured(Pretrained(files()), words)


def test_bert_import_ignores_task_heads_and_accepts_old_names(tmp_path):
    """The first published files have old names. If the head is not tied, it has its own bias."""
    target = exported(tmp_path, f"{SERIAL} kind=bert ffn=60 tied=false")
    path = target / "model.safetensors"
    stored = load_file(path)
    head = "cls.predictions"
    stored[f"{head}.decoder.bias"] = stored[f"{head}.bias"] + 1
    stored |= {f"bert.pooler.dense.{part}": SQUARE for part in ("weight", "bias")}
    stored |= {"cls.seq_relationship.weight": SQUARE, "bert.embeddings.position_ids": SQUARE}
    old = {"weight": "gamma", "bias": "beta"}
    renamed = {
        re.sub(r"(?<=LayerNorm\.)(\w+)$", lambda found: old[found[1]], name): array
        for name, array in stored.items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in renamed
    save_file(renamed, path)
    found = values(imported(target, tmp_path / "back"))
    expected = drawn_models.stored(tmp_path / "run" / "checkpoints" / "step-00000000")
    for name, array in found.items():
        np.testing.assert_array_equal(
            array, expected[name, "value"] + (name == "head.bias"), err_msg=name
        )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """Return the folder of a Mixtral."""
    return exported(tmp_path_factory.mktemp("mixtral"), f"{SERIAL} {MIXTRAL}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("moe_every 2", "--model.moe_every 2: .* has 1;"),
        ("shared_experts 1", "--model.shared_experts 1: .* has 0;"),
        ("balance_bias 0.1", "--model.balance_bias 0.1: .* has 0.0;"),
        ("top_k 1", "--model.top_k 1: .* has 2;"),
        ("experts 8", "--model.experts 8: .* has 4;"),
    ],
)
def test_mixtral_options_that_change_the_architecture_are_rejected(mixtral, word, said):
    with pytest.raises(ValueError, match=said):
        configured(Pretrained(mixtral), f"--model.{word}".split())


def test_mixture_without_experts_is_rejected_with_the_dense_family(llama, tmp_path):
    source = shutil.copytree(llama.parent, tmp_path / "source")
    told = json.loads(llama.read_text()) | {"model_type": "qwen3_moe", "num_experts": 0}
    (source / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r'no experts, .* set model_type to "qwen3" in '):
        imported(source, tmp_path / "back")


def test_mixtral_import_accepts_capacity_and_auxiliary_loss_options(mixtral):
    words = ["--model.capacity", "1.5", "--model.balance_loss", "0.5", "--model.z_loss", "0.25"]
    model = configured(Pretrained(mixtral), words).model
    assert (model.capacity, model.balance_loss, model.z_loss) == (1.5, 0.5, 0.25)


def test_expert_options_are_rejected_for_a_llama(llama):
    with pytest.raises(ValueError, match=r"--model\.experts 4: .* has 0;"):
        configured(Pretrained(llama.parent), ["--model.experts", "4"])


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"block_sparse_moe.gate.weight": None},
            "matrix .*gate.weight is missing, .* belong to a Mixtral",
        ),
        ({"block_sparse_moe.experts.3.w2.weight": None}, "lacks 'layers.0.*experts.3.w2.weight'"),
        (
            {"block_sparse_moe.experts.4.w2.weight": SQUARE},
            "has no '.*experts.4.w2.weight'",
        ),
        ({"block_sparse_moe.experts.2.w3.weight": SQUARE}, r"2.w3.weight is \[24, 24\], .*48, 24"),
        ({"mlp.experts.gate_up_proj": SQUARE}, "all experts in one array; .*save_original_format"),
    ],
)
def test_inconsistent_expert_arrays_are_rejected(mixtral, tmp_path, arrays, said):
    shutil.copytree(mixtral, source := tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights |= {f"model.layers.0.{name}": array for name, array in arrays.items()}
    weights = {name: array for name, array in weights.items() if array is not None}
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        imported(source, tmp_path / "back")
