"""`python -m hpc3d.checkpoint`: output, exit codes and error messages."""

import json
import re
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

from hpc3d import prepare
from hpc3d.checkpoint import main
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.run_tokenizer import kept_tokenizer
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.data.token_file import write_tokens
from hpc3d.data.tokenizer_files import characters
from hpc3d.generation.trained_model import find_model
from hpc3d.train import read_command_line, take_text
from tests.checkpoints import drawn_models
from tests.elided import elided
from tests.mpi import ROOT, checked
from tests.runs import ended, losses, train, without_progress

LINE = "x=2 y=2 z=2 scheme=3d microbatches=2"
STEPS = ["step-00000002", "step-00000001"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Run with two checkpoints."""
    run = tmp_path_factory.mktemp("original") / "run"
    for step in (1, 2):
        drawn_models.saved(run, LINE, step)
    return run


@pytest.fixture
def run(original, tmp_path):
    """Copy of the run that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def call(capsys, *words):
    """Return exit code, stdout lines, and stderr lines, which all begin with the command."""
    code = ended(main, *words)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert all(line.startswith("hpc3d.checkpoint: ") for line in lines)
    return code, out.splitlines(), lines


def checkpoint(run, number=0):
    return run / "checkpoints" / STEPS[number]


def test_show_prints_a_line_per_checkpoint(original, capsys):
    code, lines, _ = call(capsys, "show", original, "--json")
    assert code == 0 and [line.split()[0] for line in lines[:-1]] == STEPS
    assert lines[0].endswith("in 8 files  latest") and not lines[1].endswith("latest")
    assert "x=2 y=2 z=2, 3d, none, ZeRO 0; 29,712 parameters, 0.7 MB" in lines[0]
    found = json.loads(lines[-1])
    assert found["latest"] == STEPS[0]
    first = found["checkpoints"][0]
    about = {"step": 2, "updates": 2, "files": 8, "mesh": {"x": 2, "y": 2, "z": 2}}
    about |= {"parameters": 29712, "active": None, "bytes": 29712 * 3 * 8}
    assert first.items() >= about.items()
    assert first["parallel"]["scheme"] == "3d" and first["written_utc"].startswith("20")


def test_show_marks_the_best_checkpoint(run, capsys):
    for number, best in ((0, {"step": 1, "loss": 2.5}), (1, {"step": 1, "loss": 2.5})):
        path = checkpoint(run, number) / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"best": best}))
    code, lines, _ = call(capsys, "show", run, "--json")
    assert code == 0 and lines[0].endswith("  latest")
    assert lines[1].endswith("  best, validation loss 2.5000")
    assert json.loads(lines[-1])["best"] == STEPS[1]
    _, lines, _ = call(capsys, "show", checkpoint(run, 1))
    assert "  best, validation loss 2.5000" in lines[0]


def test_show_prints_the_active_parameters_of_a_mixture(tmp_path, capsys):
    """A token uses 2 of 4 experts in every other block, each with 2 x 24 x 96 weights and the
    biases; all other parameters are active."""
    line = "e=2 microbatches=2 experts=4 top_k=2 shared_experts=1 moe_every=2"
    folder = drawn_models.saved(tmp_path / "run", line)
    code, lines, _ = call(capsys, "show", folder, "--json")
    (found,) = json.loads(lines[-1])["checkpoints"]
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    assert found["parameters"] == sum(prod(shape) for shape in shapes.values())
    assert found["parameters"] - found["active"] == 2 * 2 * (2 * 24 * 96 + 96 + 24)
    sizes = f"{found['parameters']:,} parameters ({found['active']:,} active), "
    assert code == 0 and sizes in lines[0]


def test_show_lists_the_tensors_of_a_checkpoint(original, capsys):
    code, lines, _ = call(capsys, "show", checkpoint(original), "--json")
    assert code == 0 and lines[0].startswith(STEPS[0])
    rows = [line.split() for line in lines[2:-1]]
    table = ["1", "embedding.token", "29", "x", "24", "float64", "16,704", "value"]
    assert rows[0] == [*table, "first", "second"]
    assert ["4", "layers.*.qkv.bias", "72", "float64", "6,912"] in [row[:5] for row in rows]
    (found,) = json.loads(lines[-1])["checkpoints"]
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert len(tensors) == 4 * 12 + 4
    assert sum(tensor["bytes"] for tensor in tensors.values()) == found["bytes"]
    kinds = ["value", "first", "second"]
    assert tensors["layers.3.up.weight"] == {
        "name": "layers.3.up.weight",
        "shape": [24, 96],
        "dtype": "float64",
        "kinds": kinds,
        "bytes": 24 * 96 * 3 * 8,
    }


def test_show_names_an_incomplete_checkpoint(run, capsys):
    (checkpoint(run) / "rank-00003.bin").unlink()
    code, lines, _ = call(capsys, "show", run)
    assert code == 0
    assert re.match(f"{STEPS[0]}  .*: .*No such file", lines[0])
    assert lines[1].startswith(STEPS[1]) and "No such file" not in lines[1]


@pytest.mark.parametrize("place", ["", "checkpoints", f"checkpoints/{STEPS[0]}"])
def test_verify_passes_intact_checkpoints(original, capsys, place):
    code, lines, errors = call(capsys, "verify", original / place, "--json")
    assert (code, errors) == (0, [])
    names = STEPS[:1] if "step" in place else STEPS
    assert [line.split()[0] for line in lines[:-1]] == [
        str(original / "checkpoints" / name) for name in names
    ]
    assert json.loads(lines[-1])["whole"] is True


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shards(folder, *numbers):
    return [folder / f"rank-{number:05d}.bin" for number in numbers]


def test_verify_names_every_changed_file(run, capsys):
    for path in shards(checkpoint(run), 3, 5):
        flip(path)
    code, lines, errors = call(capsys, "verify", run, "--json")
    assert code == 3
    assert lines[0].split()[0] == str(checkpoint(run, 1))
    assert ["rank-00003.bin" in errors[0], "rank-00005.bin" in errors[1]] == [True] * 2
    found = json.loads(lines[-1])
    assert found["whole"] is False
    assert [len(one["problems"]) for one in found["checkpoints"]] == [2, 0]


def rewrite(folder, change):
    """Change the manifest, and update the digests in it."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(change(manifest) or manifest))


def first_piece(manifest):
    return manifest["files"][0]["pieces"][0]


def drop_piece(manifest):
    manifest["files"][0]["pieces"].pop()


def twice(manifest):
    """Use the slices of another rank's piece of the same size."""
    first, other = (manifest["files"][rank]["pieces"][0] for rank in (0, 4))
    assert first[0] == other[0] and first[4] != other[4]
    first[4] = other[4]


def outside(manifest):
    for part in first_piece(manifest)[4]:
        part[2], part[3] = part[2] + 1000, part[3] + 1000


def unknown(manifest):
    first_piece(manifest)[0] = "layers.0.gate"


def unknown_type(manifest):
    first_piece(manifest)[2] = "<u4"


def put(**values):
    return lambda manifest: manifest.update(values)


def without(key):
    return lambda manifest: {name: manifest[name] for name in manifest if name != key}


def settings(before, after):
    """Change the text of the stored configuration."""

    def change(manifest):
        assert before in manifest["config"]
        manifest["config"] = manifest["config"].replace(before, after)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_piece, "layers.0.qkv.bias, second: 36 of 72"),
        (twice, "rows ... two files"),
        (outside, ": ... outside"),
        (unknown, " layers.0.gate"),
        (unknown_type, "rank-00000.bin ... invalid piece"),
        (put(step=7), "manifest.json ... step 7"),
        (put(step="2"), "manifest.json: step must"),
        (put(format="other"), "step-00000002 ... checkpoint: ... manifest"),
        (put(version=99), "step-00000002 ... checkpoint: ... manifest"),
        (put(config=5), " configuration "),
        (put(config="x ="), " configuration "),
        (put(config="[modl]"), "modl: "),
        (without("config"), " configuration "),
        (without("updates"), "manifest.json: updates must"),
        (without("files"), "step-00000002 ... checkpoint: manifest.json: files"),
        (settings("layers = 4", "layers = 5"), "4 layers, ... model.layers = 5"),
        (settings("layers = 4", "layers = 1000000000"), "model.layers = 1000000000"),
        (settings("hidden = 24", "hidden = 36"), "embedding.token, value: "),
        (settings("vocabulary = 29", ""), "model.vocabulary "),
        (settings("heads = 12", "heads = 7"), "model.hidden = 24 ... model.heads = 7"),
        (lambda manifest: ["files"], "step-00000002 ... checkpoint: manifest.json "),
    ],
)
@pytest.mark.slow
def test_verify_and_export_reject_an_invalid_manifest(run, capsys, change, said):
    folder = checkpoint(run)
    rewrite(folder, change)
    code, _, errors = call(capsys, "verify", folder)
    assert code == 3 and any(re.search(elided(said), line) for line in errors), errors
    code, _, errors = call(capsys, "export", folder, "-o", run / "out")
    assert code == 2 and any(re.search(elided(said), line) for line in errors)
    assert not (run / "out").exists()
    assert call(capsys, "show", folder)[0] in (0, 2)


def test_export_uses_the_newest_intact_checkpoint(run, tmp_path, capsys):
    flip(*shards(checkpoint(run), 2))
    code, lines, errors = call(capsys, "export", run, "-o", tmp_path / "out", "--json")
    assert code == 0
    assert len(errors) == 1 and "rank-00002.bin" in errors[0]
    found = json.loads(lines[-1])
    assert found["step"] == 1 and found["checkpoint"].endswith(STEPS[1])
    assert found["parameters"] == 29712
    assert found["tensors"]["transformer.h.2.attn.c_attn.weight"] == [24, 72]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_export_can_write_a_single_file(original, tmp_path, capsys):
    target = tmp_path / "new" / "weights.safetensors"
    code, lines, _ = call(capsys, "export", original, "-o", target)
    assert code == 0 and lines[0].endswith(": 29,712 parameters in 52 tensors of type float64")
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("model", ["kind=llama ffn=48", "kind=bert ffn=48 tied=false"])
def test_import_counts_the_tensors_of_the_export(model, tmp_path, capsys):
    """hpc3d stores q, k and v in one tensor. BERT has duplicates of the weights of its head."""
    folder, out = drawn_models.saved(tmp_path / "run", model), tmp_path / "out"
    _, lines, _ = call(capsys, "export", folder, "-o", out)
    of_export = re.search(r": (.* tensors)", lines[0]).group(1)
    code, lines, _ = call(capsys, "import", out, "-o", tmp_path / "back")
    assert code == 0 and lines[0] == f"{out}: {of_export}"


def test_export_reports_that_a_mixtral_drops_no_token(tmp_path, capsys):
    mixture = "kind=llama ffn=48 e=2 microbatches=2 experts=4 top_k=2"
    folder = drawn_models.saved(tmp_path / "run", mixture)
    code, lines, errors = call(capsys, "export", folder, "-o", tmp_path / "out")
    assert (code, errors) == (0, [])
    assert (
        "model.capacity = 1.25: MixtralForCausalLM has no capacity limit and drops no tokens"
        in lines
    )


def test_export_overwrites_only_with_force(original, tmp_path, capsys):
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("mine")
    words = "export", original, "-o", target
    code, _, errors = call(capsys, *words)
    assert code == 2 and re.search(r"config\.json already exists; .* --force$", errors[0])
    assert (target / "config.json").read_text() == "mine"
    assert call(capsys, *words, "--force")[0] == 0
    assert (target / "config.json").read_text() != "mine"


def test_export_removes_files_of_an_earlier_export(original, tmp_path, capsys):
    """Files with its names are removed if the folder contains weights; no other files are."""
    target = tmp_path / "out"
    target.mkdir()
    names = "generation_config.json", "tokenizer.json", "README.md", "LICENSE"
    for name in names:
        (target / name).write_text("theirs")
    words = "export", original, "-o", target, "--force"
    assert call(capsys, *words)[0] == 0
    kept = {"config.json", "model.safetensors"}
    assert {path.name for path in target.iterdir()} == {*names, *kept}
    assert call(capsys, *words)[0] == 0
    assert {path.name for path in target.iterdir()} == {*names[2:], *kept}
    assert (target / "README.md").read_text() == "theirs"


def test_import_creates_a_run_and_prints_how_to_resume_it(original, tmp_path, capsys, monkeypatch):
    call(capsys, "export", original, "-o", tmp_path / "out")
    again = tmp_path / "again"
    monkeypatch.chdir(tmp_path)
    for key in ("path", "validation"):
        code, _, errors = call(capsys, "import", "out", "-o", again, f"--data.{key}", "b.txt")
        assert code == 2 and f"data.{key}: b.txt does not exist; " in errors[0]
        assert not again.exists()
    Path("a.txt").write_text("abba")
    write_tokens(Path("a.h5"), [Path("a.txt")], characters({"a": 0, "b": 1}))
    # settings may stand anywhere
    settings = "--train.steps", 3, "--seed=5", "--data.path", "a.h5", "--checkpoint.every=5"
    words = "import", *settings, tmp_path / "out", "-o", again, "--json"
    code, lines, errors = call(capsys, *words)
    assert (code, errors) == (0, [])
    assert lines[-2].endswith(f"train --launch N --resume {again}")
    assert json.loads(lines[-1]) == {"run": str(again), "parameters": 29712, "tensors": 52}
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    text = (again / "config.toml").read_text()
    assert "steps = 3" in text and "seed = 5" in text and f'path = "{tmp_path}/a.h5"' in text
    assert call(capsys, "verify", again)[0] == 0
    code, _, errors = call(capsys, *words)
    assert code == 2 and str(again) in errors[0]


def test_import_compares_the_tokenizer_of_the_text(original, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(capsys, "export", original, "-o", "out")
    Path("a.txt").write_text("ab")
    for name, letters in (("ours", {"a": 0, "b": 1}), ("other", {"b": 0, "a": 1})):
        write_tokens(Path(f"{name}.h5"), [Path("a.txt")], characters(letters))
    Path("out", "tokenizer.json").write_text(characters({"a": 0, "b": 1}).json)
    hint = "tokenize texts with its tokenizer: python -m hpc3d.prepare TEXT -o tokens.h5 "
    for run, given in (("ours", ["--data.path", "ours.h5"]), ("none", [])):
        code, lines, errors = call(capsys, "import", "out", "-o", run, *given)
        assert (code, errors) == (0, [])
        assert (f"{hint}--tokenizer {run}" in lines) == (not given)
        assert lines[-1].endswith("--data.path tokens.h5") == (not given)
    for text in ("other.h5", "a.txt"):
        code, _, (error,) = call(capsys, "import", "out", "-o", "run", "--data.path", text)
        assert code == 2 and f"data.path = {tmp_path / text}: the tokenizer of this tex" in error
        assert error.endswith("--tokenizer out/tokenizer.json") and not Path("run").exists()
    Path("a.jsonl").touch()
    advice = "a.jsonl -o tokens.h5 --tokenizer"
    code, _, (error,) = call(capsys, "import", "out", "-o", "run", "--data.path", "a.jsonl")
    assert code == 2 and error.endswith(f"{advice} out")
    for key in ("--data.path", "--data.validation"):
        plan = read_command_line(1, ["--resume", "ours", key, "a.jsonl"])
        with pytest.raises(ValueError, match=f"{advice} {plan.resumed}$"):
            take_text(plan)


def test_import_rejects_a_text_with_a_larger_vocabulary(original, tmp_path, capsys):
    call(capsys, "export", original, "-o", tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink(missing_ok=True)
    (tmp_path / "a.txt").write_text("ab")
    made = characters({chr(300 + number): number for number in range(300)} | {"a": 300, "b": 301})
    write_tokens(tmp_path / "a.h5", [tmp_path / "a.txt"], made)
    words = "import", tmp_path / "out", "-o", tmp_path / "run", "--data.path", tmp_path / "a.h5"
    code, _, (error,) = call(capsys, *words)
    assert code == 2 and "a.h5: the tokenizer of this text needs a vocabulary of 302 " in error
    assert not (tmp_path / "run").exists()


def test_import_stores_the_tokenizer_of_the_text_if_the_model_has_none(
    original, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    call(capsys, "export", original, "-o", "out", "--force")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("out", name).unlink(missing_ok=True)
    Path("a.txt").write_text("abba")
    made = characters({"a": 0, "b": 1})
    write_tokens(Path("a.h5"), [Path("a.txt")], made)
    for run, given in (("run", ["--data.path", "a.h5"]), ("without", [])):
        assert call(capsys, "import", "out", "-o", run, *given)[0] == 0
    assert kept_tokenizer(Path("run")).json == made.json
    assert kept_tokenizer(Path("without")) is None
    Path("a.h5").unlink()
    assert find_model(Path("run"), []).tokenizer.json == made.json
    words = "a.txt", "-o", "again.h5", "--tokenizer", "run"
    assert prepare.main([*words]) == 0
    assert call(capsys, "export", "run", "-o", "exported")[0] == 0
    assert kept_tokenizer(Path("exported")).json == made.json


@pytest.mark.parametrize("vocabulary", [300, 256])
def test_import_without_a_tokenizer_suggests_a_token_file(vocabulary, tmp_path, capsys):
    """A model of bytes reads texts."""
    export(
        Checkpoint(drawn_models.saved(tmp_path / "first", f"vocabulary={vocabulary}")),
        tmp_path / "out",
    )
    code, lines, _ = call(capsys, "import", tmp_path / "out", "-o", tmp_path / "run")
    text = "TEXT" if vocabulary == 256 else "tokens.h5"
    assert code == 0 and lines[-1].endswith(f"--checkpoint.every 100 --data.path {text}")
    hints = [line for line in lines if line.startswith("the model has no tokenizer; ")]
    assert len(hints) == (vocabulary == 300)
    assert all("hpc3d.prepare train.bin -o tokens.h5" in line for line in hints)
    (tmp_path / "a.txt").write_text("a text of bytes")
    words = tmp_path / "out", "-o", tmp_path / "again", "--data.path", tmp_path / "a.txt"
    code, _, errors = call(capsys, "import", *words)
    assert code == (2 if vocabulary == 300 else 0)
    assert all("is unknown and has 300 tokens; " in line for line in errors)


def test_import_prints_the_dropout_of_the_model(tmp_path, capsys):
    export(
        Checkpoint(drawn_models.saved(tmp_path / "first", "kind=llama ffn=48 tied=false")),
        tmp_path / "out",
    )
    path = tmp_path / "out" / "config.json"
    for rate, words, count in ((0.1, [], 1), (0.0, [], 0), (0.1, ["--model.dropout", "0"], 0)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": rate}))
        run = tmp_path / f"run-{rate}{len(words)}"
        code, lines, _ = call(capsys, "import", tmp_path / "out", "-o", run, *words)
        said = "model.dropout = 0.1, from attention_dropout: training applies it to the embeddings"
        assert code == 0 and sum(line.startswith(said) for line in lines) == count


@pytest.fixture
def places(original, tmp_path):
    """Create the files and folders that the invalid command lines below name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(bytes(20))
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "model.safetensors.index.json").write_text("[]")
    return {"run": original, "step": checkpoint(original), "t": tmp_path, "out": tmp_path / "out"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "the following arguments are required"),
        ("shw {run}", "invalid choice: 'shw'"),
        ("show", "required: RUN_DIR|CHECKPOINT"),
        ("show {t}/absent", "{t}/absent ...(checkpoint.every), ... step-00000010"),
        ("show {t}/empty", "{t}/empty ...(checkpoint.every), ... step-00000010"),
        ("show {t}/file", "{t}/file ...(checkpoint.every), ... step-00000010"),
        ("show {run} --train.steps 3", "--train.steps: ... import"),
        ("show {t}/hf", "{t}/hf: a model of Hugging Face ... import {t}/hf -o results/NEW, "),
        ("verify {t}/hf", "{t}/hf: a model of Hugging Face ... import {t}/hf -o results/NEW, "),
        ("verify {run} --deep", "unrecognized arguments: --deep"),
        ("verify {t}/empty", "{t}/empty ...(checkpoint.every), ... step-00000010"),
        ("export {run}", "required: -o/--output"),
        ("export {run} -o {t}/file", "{t}/file ... NAME.safetensors"),
        ("export {t}/empty -o {out}", "{t}/empty ...(checkpoint.every), ... step-00000010"),
        ("import {t}/absent -o {out}", "{t}/absent: "),
        ("import {t}/empty -o {out}", "{t}/empty ... model.safetensors"),
        ("import {t}/pickled -o {out}", "{t}/pickled... pytorch_model.bin, ...save_pretrained("),
        (
            "import {t}/pickled/pytorch_model.bin -o {out}",
            "{t}/pickled... pytorch_model.bin, ...save_pretrained(...hugging-face.md ...ckpt.pt",
        ),
        ("import {t}/torn -o {out}", "{t}/torn/model.safetensors "),
        ("import {t}/listed -o {out}", "{t}/listed/model.safetensors.index.json: ... JSON"),
        ("import {t}/torn -o {out} --train.steps", "{t}/torn/model.safetensors "),
        ("import {t}/torn -o {out} x", "unrecognized arguments: x"),
    ],
)
def test_invalid_command_lines_are_rejected_in_one_line(places, capsys, line, said):
    code, lines, errors = call(capsys, *line.format(**places).split())
    assert (code, lines, len(errors)) == (2, [], 1)
    assert re.search(elided(said.format(**places)), errors[0])
    assert not (places["t"] / "out").exists()


def test_missing_option_value_is_reported(original, tmp_path, capsys):
    call(capsys, "export", original, "-o", tmp_path / "out")
    words = "import", tmp_path / "out", "-o", tmp_path / "run", "--train.steps"
    code, _, errors = call(capsys, *words)
    facts = "hpc3d.checkpoint: --train.steps: ... --train.steps VALUE"
    assert code == 2 and re.fullmatch(elided(facts), *errors)


@pytest.mark.parametrize("room", [0, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_full_disk_is_reported_in_one_line_and_leaves_nothing(original, tmp_path, capsys, room):
    call(capsys, "export", original, "-o", tmp_path / "good")
    for words in (
        ("export", original, "-o", tmp_path / "out.safetensors"),
        ("import", tmp_path / "good", "-o", tmp_path / "run"),
    ):
        program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
from hpc3d import prepare
from hpc3d.checkpoint import main
from hpc3d.checkpoints.run_tokenizer import kept_tokenizer
sys.exit(main({[str(word) for word in words]}))
"""
        line = [sys.executable, "-B", "-c", program]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
        told = without_progress(done.stderr)
        assert done.returncode == 2 and told.startswith("hpc3d.checkpoint: ")
        assert told.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_help_lists_subcommands_and_exit_codes():
    line = [sys.executable, "-m", "hpc3d.checkpoint", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    for word in (
        "show",
        "verify",
        "export",
        "import",
        "exit codes: 0 success, 2 invalid input, 3 ",
    ):
        assert word in done.stdout


@pytest.mark.slow
def test_exported_and_reimported_run_resumes_with_the_same_loss(tmp_path, capsys):
    """The learning rate is 0, so the saved weights are the initial ones, and the losses equal."""
    same = {"train__learning_rate": 0, "train__steps": 1, "checkpoint__every": 1}
    first = train(2, tmp_path / "first", **same)
    assert call(capsys, "export", first, "-o", tmp_path / "out")[0] == 0
    back = tmp_path / "back"
    batch = "--train.batch", 144, "--train.steps", 1
    assert call(capsys, "import", tmp_path / "out", "-o", back, *batch)[0] == 0
    checked(3, "-m", "hpc3d.train", "--resume", back)
    assert losses(back)[0] == pytest.approx(losses(first)[0], rel=1e-10)
    assert Checkpoint(back / "checkpoints" / "step-00000000").header["config"]
