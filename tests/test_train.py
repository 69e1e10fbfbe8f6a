"""The command `train`: invalid input, the files of a run, and equal losses."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import hpc3d.trace
from hpc3d import train as verb
from hpc3d.config.input_file import Config
from hpc3d.config.load import load
from hpc3d.config.package_data import text_path
from hpc3d.config.resolve import resolve
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import BpeTokenizer, library, train_bpe
from hpc3d.trace.checks_per_rank import violations
from hpc3d.training import run_folder
from tests.data.prepared import TEXT
from tests.data.test_batches import Numbers
from tests.mpi import ROOT, checked, launching, mpirun
from tests.runs import losses, newest, plan_of, said, train, without_progress, words
from tests.strided import daily, strided

slow = pytest.mark.slow

# Bad input


def bad_text(tmp_path):
    path = tmp_path / "binary.txt"
    path.write_bytes(bytes(range(256)))
    return {"data__path": path}, [f"data.path: {path} is not a readable UTF-8 text"]


def bad_tokens(tmp_path):
    path = tmp_path / "tokens.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    return {"data__path": path}, [f"data.path: {path} is not a readable token file"]


def missing_text(tmp_path):
    return {"data__path": "nowhere"}, ["data.path: nowhere does not exist; use a text"]


def short_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc")
    return {"data__path": path}, ["data.path: 4 tokens, but model.sequence = 4 needs at least 5"]


def short_validation(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc")
    line = "data.validation: 4 tokens, but model.sequence = 4 needs at least 5; use a longer text"
    return {"data__validation": path, "train__eval_every": 1}, [line]


def no_validation(tmp_path):
    """A validation fraction that rounds to no token."""
    return {"data__validation": 1e-9, "train__eval_every": 1}, [
        "data.validation: 0 tokens, but model.sequence = 4 needs at least 5; use a longer text"
    ]


def no_token_to_mask(tmp_path):
    return {"model__kind": "bert", "model__vocabulary": 256}, [
        "model.vocabulary = 256: the tokenizer has 256 tokens and needs a mask token; "
    ]


def padding_that_masks(tmp_path):
    return {"model__kind": "bert", "model__padding": 256}, [
        "model.padding = 256 must be below 256"
    ]


def small_vocabulary(tmp_path):
    return {"model__vocabulary": 100}, [
        "model.vocabulary = 100: the tokenizer has 256 tokens; set it to at least 256, such as "
        "--model.vocabulary 256"
    ]


def unwritable(tmp_path):
    path = tmp_path / "file"
    path.touch()
    return {"run__out": path}, [f"run.out = '{path}': cannot write to this folder"]


def several(tmp_path):
    values = {"train__stepz": 1, "train__steps": "many", "modell.x": 1}
    return values, ["train.stepz: unknown key", "train.steps: input should", "modell: unknown"]


def wrong_ranks(tmp_path):
    return {"mesh__x": 3}, ["mesh: x 3 = 3 ranks, but"]


def indivisible(tmp_path):
    values = {"parallel__scheme": "1d", "model__heads": 9}
    return values, ["mesh: no cuboid of"]


BAD = [
    bad_text,
    bad_tokens,
    missing_text,
    short_text,
    short_validation,
    no_validation,
    small_vocabulary,
    no_token_to_mask,
    padding_that_masks,
    unwritable,
    several,
    wrong_ranks,
    indivisible,
]


@pytest.mark.parametrize("bad", strided(BAD, 10, ids=lambda bad: bad.__name__))
def test_each_input_problem_is_one_line_and_exits_with_2(bad, tmp_path):
    out = tmp_path / "results"
    values, expected = bad(tmp_path)
    done = mpirun(2, "-m", "hpc3d.train", *words(out, **values))
    found = said(done)
    assert len(found) == len(expected)
    for line in expected:
        assert any(one.startswith(f"hpc3d.train: {line}") for one in found)
    assert done.returncode == 2
    assert not re.search("MPI_ABORT|Traceback", done.stderr)
    assert not done.stdout
    assert not out.exists()


@pytest.mark.parametrize("option", ["launch", "resume", "dry-run", "machine", "ranks"])
def test_mistyped_option_suggests_an_option_of_train(option):
    mistyped = f"--{option[:2]}{option[3:]}"
    line = f"^{mistyped}: unknown option; did you mean --{option}[?]$"
    with pytest.raises(ValueError, match=line):
        verb.read_command_line(1, ["--train.steps", "3", mistyped, "4"])


# What a run leaves


RANKS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run of RANKS ranks, with a secret in its environment."""
    out = tmp_path_factory.mktemp("out")
    line = words(out, name="four", train__steps=3)
    secret = {"SOME_TOKEN": "do-not-write-this"}
    stdout = checked(RANKS, "-m", "hpc3d.train", *line, environment=secret)
    return newest(out), stdout


def test_tokenizer_with_a_mask_token_adds_no_vocabulary(tmp_path):
    """As with BERT's tokenizer, the vocabulary of the model is that of the tokenizer."""
    pytest.importorskip("tokenizers")
    known = library().Tokenizer.from_str(train_bpe([TEXT.encode()], 275).json)
    known.add_special_tokens(["[MASK]", "[CLS]"])
    made = BpeTokenizer(known.to_str())
    (tmp_path / "a.txt").write_text(TEXT)
    write_tokens(tmp_path / "a.h5", [tmp_path / "a.txt"], made)
    values = {"model__kind": "bert", "model__vocabulary": made.vocabulary}
    options = words(tmp_path, data__path=tmp_path / "a.h5", **values)
    plan = verb.read_command_line(1, options)
    verb.take_text(plan)
    assert plan.config.model.vocabulary == made.vocabulary == 277
    assert plan.notes == ["tokenizer: bpe, 277 tokens"]
    plan = verb.read_command_line(1, [*options, "--model.padding", "275"])
    with pytest.raises(ValueError, match=r"model.padding = 275 is the ID of the .* mask token; "):
        verb.take_text(plan)


def test_file_without_ends_of_documents_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    made = train_bpe([TEXT.encode()], 275)
    (tmp_path / "a.txt").write_text(TEXT)
    np.array(made.encode_batch([TEXT.encode()])[0], "<u2").tofile(tmp_path / "b.bin")
    for name in ("a.txt", "b.bin"):
        write_tokens((tmp_path / name).with_suffix(".h5"), [tmp_path / name], made)
    paths = f'["{tmp_path}/a.h5", "{tmp_path}/b.h5"]'
    plan = verb.read_command_line(
        1, words(tmp_path, data__path=paths, data__boundaries="true", model__vocabulary=275)
    )
    with pytest.raises(ValueError, match=r"^data.boundaries = true: \S*b\.h5 contains no end"):
        verb.take_text(plan)
    more = {"data__boundaries": "true", "data__validation": tmp_path / "b.h5"}
    plan = verb.read_command_line(
        1, words(tmp_path, data__path=tmp_path / "a.h5", model__vocabulary=275, **more)
    )
    with pytest.raises(ValueError, match=r"^data.validation: \S*b\.h5 contains no token 0, but "):
        verb.take_text(plan)


def test_separator_of_documents_is_the_end_token_of_the_tokenizer():
    tokens = Numbers(300)
    tokens.documents, tokens.end = 1, lambda: 7
    packed = ["--data.boundaries", "true"]
    for more, separator in ((packed, 7), ([*packed, "--data.separator", "5"], 5), ([], None)):
        assert verb._with_vocabulary(load(None, more), tokens).data.separator == separator
    with pytest.raises(ValueError, match=r"^data.separator = 300: .* use an ID below 300$"):
        verb._with_vocabulary(load(None, [*packed, "--data.separator", "300"]), tokens)
    tokens.documents = 0  # no token 7
    for more in (packed, ["--data.shuffle", "documents"]):
        with pytest.raises(
            ValueError, match=r"^data.* = (true|documents): inputs/corpus contains"
        ):
            verb._with_vocabulary(load(None, more), tokens)
    verb._with_vocabulary(load(None, [*packed, "--data.separator", "5"]), tokens)
    tokens.length = 5  # no token 5
    with pytest.raises(ValueError, match=r"^data.path: .* end with token 5 \(data.separator\); "):
        verb._with_vocabulary(load(None, [*packed, "--data.separator", "5"]), tokens)
    tokens.end = lambda: None
    with pytest.raises(ValueError, match=r"^data.boundaries = true: .* set data.separator to its"):
        verb._with_vocabulary(load(None, packed), tokens)


def test_texts_with_another_end_token_than_the_run_are_rejected(tmp_path):
    """The texts contain the separator, which also is a letter, but end with another token."""
    pytest.importorskip("tokenizers")
    made = train_bpe([TEXT.encode()], 275)
    for name, end in (("a", "t"), ("b", "t"), ("c", None)):
        (tmp_path / "text.txt").write_text(f"{name} t {TEXT}")
        write_tokens(
            tmp_path / f"{name}.h5", [tmp_path / "text.txt"], BpeTokenizer(made.json, end)
        )
    paths = {name: str(tmp_path / f"{name}.h5") for name in "abc"}
    documents = {"data__path": paths["a"], "data__boundaries": "true", "model__vocabulary": 275}
    run = plan_of(words(tmp_path / "runs", **documents)).folder
    for text, line in (("b", None), ("c", "token 0 (<|end|>), but documents end with token ")):
        resumed = verb.read_command_line(1, ["--resume", str(run), "--data.path", paths[text]])
        validated = verb.read_command_line(
            1, words(tmp_path, data__validation=paths[text], **documents)
        )
        for plan, key in ((resumed, "data.path"), (validated, "data.validation")):
            if line is None:
                verb.take_text(plan)
                continue
            with pytest.raises(ValueError, match=rf"^{key}: \S*c.h5 ") as refused:
                verb.take_text(plan)
            assert line in str(refused.value)


@pytest.mark.parametrize(
    ("given", "ranks", "line"),
    [
        (["--launch"], 1, "--launch: the value is missing; use --launch VALUE"),
        (["--launch", "0"], 1, "--launch 0: must be an integer from 1 to "),
        (["--launch=many"], 1, "--launch many: must be an integer from 1 to "),
        (["--launch", "1000000"], 1, "--launch 1000000: the memory of this machine suffices for "),
        (["--launch", "5", "--mesh.d", "2"], 1, "mesh: d 2 = 2 ranks, but the job has 5 "),
        (["--launch", "2"], 4, "--launch 2: a launcher has already started 4 ranks; use either"),
    ],
)
def test_invalid_launch_is_rejected_in_one_line(given, ranks, line, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))
    assert verb.main(["gpt-serial", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpc3d.train: {line}") and error.count("\n") == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert verb.main(["gpt-serial", *given]) == 0 and capsys.readouterr() == ("", "")


def test_launch_replaces_this_process_by_the_launcher(monkeypatch):
    """More ranks than cores are permitted, unless the user's environment forbids them."""
    variable = "PRTE_MCA_rmaps_default_mapping_policy"
    calls = []
    monkeypatch.setattr(verb.mpi_launcher, "launch_command", lambda ranks: ["/mpirun", str(ranks)])
    monkeypatch.setattr(verb.mpi_launcher, "filter_standard_error", lambda: None)
    monkeypatch.setattr(os, "execve", lambda *given: calls.append(given))
    monkeypatch.setattr(verb.launch, "run", lambda *given: 0)
    monkeypatch.delenv(variable, raising=False)
    verb.main(["gpt-3d-8", "--launch", "8", "--train.steps", "1"])
    monkeypatch.setenv(variable, "core")
    verb.main(["--launch=64"])
    first, second = calls
    program = [sys.executable, "-m", "hpc3d.train"]
    assert first[:2] == (
        "/mpirun",
        ["/mpirun", "8", *program, "gpt-3d-8", "--train.steps", "1"],
    )
    assert first[2][variable] == "slot:oversubscribe" and second[2][variable] == "core"
    assert second[1] == ["/mpirun", "64", *program]


def test_launch_prints_only_the_error_of_hpc3d(tmp_path):
    options = words(tmp_path, data__path=tmp_path / "missing.txt", mesh__d=2)
    done = launching("-m", "hpc3d.train", "--launch", 2, *options)
    (line,) = without_progress(done.stderr).splitlines()
    assert line.startswith(f"hpc3d.train: data.path: {tmp_path}/missing.txt does not exist; ")
    assert (done.returncode, done.stdout) == (2, "")


def test_dry_run_starts_no_ranks(capsys):
    given = ["--launch", "3", "--mesh.d", "3", "--train.batch", "3", "--dry-run"]
    assert verb.main(["gpt-serial", *given]) == 0
    assert "3 ranks" in capsys.readouterr().out


def test_run_completes_with_closed_standard_streams(tmp_path):
    """The standard output of the rank is a closed pipe, and it has no other standard streams."""
    end, start = os.pipe()
    os.close(end)
    options = words(tmp_path, train__steps=3, model__layers=1)
    command = [sys.executable, "-m", "hpc3d.train", *options]
    shell = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *command]
    with open(start, "w") as pipe:
        done = subprocess.run(shell, stdout=pipe, cwd=ROOT, timeout=250, check=False)
    assert done.returncode == 0
    lines = (newest(tmp_path) / "train.log").read_text().splitlines()
    assert any(" 3/3" in line for line in lines) and lines[-1].startswith("run kept in ")


@pytest.mark.slow
def test_run_folder_records_configuration_environment_and_position(run):
    path, stdout = run
    assert re.fullmatch(r"four-\d{8}-\d{6}", path.name)
    assert {entry.name for entry in path.iterdir()} == {
        "config.toml",
        "command.txt",
        "environment.json",
        "train.log",
        "lock",
        "metrics.jsonl",
        "position.json",
        "trace",
        "trace.h5",
    }
    config = load(path / "config.toml", [])
    settled = {"model__vocabulary": 256, "data__tokenizer": "byte", "train__decay_steps": 3}
    settled["data__path"] = os.path.abspath("inputs/corpus")
    asked = words(path.parent, name="four", train__steps=3, **settled)
    assert config == resolve(load(None, asked), RANKS)
    assert "--train.steps 3" in (path / "command.txt").read_text()
    assert (path / "train.log").read_text() == stdout
    position = json.loads((path / "position.json").read_text())
    assert position == {"step": 3, "epoch": 0, "offset": 432, "sequences": 432}


@pytest.mark.slow
def test_environment_file_has_versions_and_ranks_but_no_secrets(run):
    path, _ = run
    environment = json.loads((path / "environment.json").read_text())
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["hpc3d"] == hpc3d.__version__
    assert 0 <= environment.get("other_cpu_share", 0) <= 1
    assert environment["processor"] and environment["memory_bytes"] > 1 << 28
    assert re.fullmatch(r"\S+ \S+, \S+ kernels", environment["blas"])
    assert len(environment["load"]) == 3
    with open_tokens(text_path(Config().data.path)) as tokens:
        assert environment["data"] == {"data.path": tokens.sha256}
    assert [place["local_rank"] for place in environment["ranks"]] == list(range(RANKS))
    assert len({place["pid"] for place in environment["ranks"]}) == RANKS
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    assert not any(b"do-not-write-this" in entry.read_bytes() for entry in files)


def test_log_has_a_line_per_step(run):
    path, _ = run
    lines = (path / "train.log").read_text().splitlines()
    steps = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [line[0] for line in steps] == ["0", "1", "2"]
    assert lines[-1].split()[-1] == str(path)
    with hpc3d.trace.open(path / "trace.h5") as trace:
        losses = trace.steps["loss"][:3]
    assert [line[1] for line in steps] == [f"{loss:.4f}" for loss in losses]


def test_trace_has_all_ranks_and_matching_calls(run):
    path, _ = run
    with hpc3d.trace.open(path / "trace.h5") as trace:
        assert trace.attrs["complete"] and violations(trace) == []
        assert tomllib.loads(trace.attrs["config"])["model"]["hidden"] == 144
        events = {name: trace.events[name] for name in ("rank", "group", "seq", "op", "step")}
        groups = trace.groups
    assert set(events["rank"]) == set(range(RANKS))
    calls = defaultdict(list)
    for group, seq, rank, op in zip(*(events[key] for key in ("group", "seq", "rank", "op"))):
        if seq >= 0:
            calls[group, seq].append((rank, op))
    assert {group for group, _ in calls} == set(range(len(groups)))
    for (group, _), members in calls.items():
        assert tuple(sorted(rank for rank, _ in members)) == groups[group].members
        assert len({op for _, op in members}) == 1


def test_every_rank_records_every_step_with_the_same_loss(run):
    path, _ = run
    with hpc3d.trace.open(path / "trace.h5") as trace:
        rows = list(zip(*(trace.steps[key] for key in ("rank", "step", "loss", "grad_norm"))))
    assert [row[:2] for row in rows] == [
        (rank, step) for rank in range(RANKS) for step in range(3)
    ]
    assert len({row[1:] for row in rows}) == 3


@slow
def test_passes_and_steps_use_the_same_cpu_clock(tmp_path):
    """On four ranks that share cores, passes take more wall time than CPU time."""
    sizes = {"train__steps": 2, "train__batch": 24, "model__hidden": 48}
    path = train(4, tmp_path, trace__clock="cpu", **sizes)
    with hpc3d.trace.open(path) as trace:
        steps = trace.steps
        passes = steps["forward_s"] + steps["backward_s"]
        assert (passes > 0).all()
        assert (passes <= (steps["t_end"] - steps["t_start"]) * 1e-9).all()
        assert isinstance(trace.attrs["cores"], int) and trace.attrs["cores"] > 0


@slow
def test_run_without_a_trace_writes_none(tmp_path):
    path = train(1, tmp_path, train__steps=1, trace__enabled="false")
    assert not list((path / "trace").iterdir())
    assert not (path / "trace.h5").exists()


def test_runs_started_in_the_same_second_have_separate_folders(tmp_path, monkeypatch):
    class Frozen(run_folder.datetime):
        @classmethod
        def now(cls, zone):
            return cls(2025, 1, 2, 3, 4, 5, tzinfo=zone)

    monkeypatch.setattr(run_folder, "datetime", Frozen)
    config = load(None, ["--run.out", str(tmp_path)])
    made = {}

    def create(number):
        made[number] = run_folder.create(config, f"run {number}")

    workers = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(made.values())) == 8
    assert min(path.name for path in made.values()) == "gpt-20250102-030405"
    for number, path in made.items():
        assert (path / "config.toml").read_text() == f"run {number}"


# The one command


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["--train.batch", "4"]),
        pytest.param(7, [], marks=slow),  # README.md has it on 64
        *(pytest.param(ranks, [], marks=pytest.mark.slow) for ranks in (1, 3)),
    ],
)
def test_default_run_works_on_any_ranks_in_an_empty_folder(ranks, words, tmp_path):
    line = ["-m", "hpc3d.train", "--train.steps", "1", *words]
    out = checked(ranks, *line, cwd=tmp_path, timeout=200)
    (path,) = (tmp_path / "results").iterdir()
    assert f" {path}\n" in out
    assert re.search(rf"^{ranks} ranks?: ", out, re.MULTILINE)
    assert re.search(r"^ +0 +\d\.\d{4} ", out, re.MULTILINE)


def test_help_is_printed_once_on_several_ranks():
    out = checked(2, "-m", "hpc3d.train", "--help")
    assert out.count("mpirun -np N python -m hpc3d.train [INPUT.toml]") == 1


def test_defaults_match_the_shipped_input():
    shipped = Path(run_folder.__file__).parents[2] / "inputs" / "gpt-3d-64.toml"
    config = load(shipped, [])
    assert (config.train, config.data) == (Config().train, Config().data)


# Equal losses

STEPS = 4


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """Losses of the first steps on one rank."""
    found = losses(train(1, tmp_path_factory.mktemp("serial"), train__steps=STEPS))
    assert len(found) == STEPS and found[-1] < found[0]
    return found


@slow
@pytest.mark.parametrize(
    ("x", "y", "z"),
    [(2, 3, 2), (3, 3, 3)],
)
def test_any_cuboid_has_the_serial_losses(x, y, z, serial, tmp_path):
    path = train(x * y * z, tmp_path, 280, train__steps=STEPS, mesh__x=x, mesh__y=y, mesh__z=z)
    np.testing.assert_allclose(losses(path), serial, rtol=0, atol=1e-9)


@slow
def test_64_ranks_have_the_serial_losses_without_a_watchdog_alarm(serial, tmp_path):
    path = train(64, tmp_path, 280, train__steps=STEPS, run__watchdog_s=20)
    np.testing.assert_allclose(losses(path), serial, rtol=0, atol=1e-9)


@daily
@slow
@pytest.mark.parametrize(("scheme", "ranks"), [("1d", 2), ("2d-summa", 4), ("3d-broadcast", 8)])
def test_every_scheme_has_the_serial_losses(scheme, ranks, serial, tmp_path):
    path = train(ranks, tmp_path, train__steps=STEPS, parallel__scheme=scheme)
    np.testing.assert_allclose(losses(path), serial, rtol=0, atol=1e-9)


@slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_data_parallel_mpi_run_has_the_serial_losses(ranks, serial, tmp_path):
    how = {"mesh__d": 2, "mesh__transport": "mpi", "parallel__keep_gathered": "false"}
    path = train(ranks, tmp_path, train__steps=STEPS, **how)
    np.testing.assert_allclose(losses(path), serial, rtol=0, atol=1e-9)


@slow
def test_different_seed_has_different_losses(serial, tmp_path):
    path = train(1, tmp_path, train__steps=2, seed=4321)
    assert np.abs(losses(path) - serial[:2]).min() > 1e-6


def test_unused_validation_text_is_reported(tmp_path):
    run = train(1, tmp_path, train__steps=1, data__validation=0.05)
    log = (run / "train.log").read_text(encoding="utf-8")
    assert "data.validation is not evaluated, because train.eval_every = 0" in log
