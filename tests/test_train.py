"""The verb `train` from the command line: bad input, faults, what a run leaves, equal losses."""

import json
import re
import threading
import time
import tomllib
import uuid
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import hpc3d.trace
from hpc3d.config import Config, load
from hpc3d.rules import settle
from hpc3d.tensor.split import SCHEMES
from hpc3d.trace.merge import merge
from hpc3d.training import folder as run_folder
from tests.mpi import checked, mpirun

slow = pytest.mark.slow
EIGHT_AND_64 = [8, pytest.param(64, marks=slow)]
FOUR_AND_64 = [4, pytest.param(64, marks=slow)]

# Divides over 2 x 2 x 2, 2 x 3 x 2, 3 x 3 x 3 and 4 x 4 x 4, and over 8 ranks in every scheme.
SMALL = {
    "model.hidden": 144,
    "model.heads": 24,
    "model.sequence": 4,
    "train.batch": 144,
    "train.decay": "constant",  # so that a shorter run has the first losses of a longer one
    "train.dtype": "float64",
}


def words(out, **values):
    """The command line of a small run under `out`; a section's dot is written `__`."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    options = {**SMALL, "run.out": out, **given}
    return [str(word) for key, value in options.items() for word in (f"--{key}", value)]


def train(ranks, out, timeout=120, **values):
    """The folder of a run that must go well."""
    checked(ranks, "-m", "hpc3d.train", *words(out, **values), timeout=timeout)
    return newest(out)


def newest(out):
    return max(Path(out).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def said(done):
    return [line for line in done.stderr.splitlines() if line.startswith("hpc3d.")]


# Bad input


def bad_text(tmp_path):
    path = tmp_path / "binary.txt"
    path.write_bytes(bytes(range(256)))
    return {"data__path": path}, [f"data.path: {path} is no readable UTF-8 text"]


def bad_tokens(tmp_path):
    path = tmp_path / "tokens.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    return {"data__path": path}, [f"data.path: {path} is no readable token file"]


def missing_text(tmp_path):
    return {"data__path": "nowhere"}, ["data.path: nowhere does not exist; name a text"]


def short_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc")
    return {"data__path": path}, ["data.path: 4 tokens, but model.sequence = 4 takes at least 5"]


def small_vocabulary(tmp_path):
    return {"model__vocabulary": 100}, ["model.vocabulary = 100: the tokenizer has 25"]


def unwritable(tmp_path):
    path = tmp_path / "file"
    path.touch()
    return {"run__out": path}, [f"run.out = '{path}': cannot write there"]


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
    small_vocabulary,
    unwritable,
    several,
    wrong_ranks,
    indivisible,
]


@pytest.mark.parametrize("ranks", FOUR_AND_64)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_bad_input_is_a_line_each_and_exit_code_2(bad, ranks, tmp_path):
    out = tmp_path / "results"
    values, expected = bad(tmp_path)
    begin = time.monotonic()
    done = mpirun(ranks, "-m", "hpc3d.train", *words(out, **values), timeout=60)
    assert time.monotonic() - begin < 20
    found = said(done)
    assert len(found) == len(expected)
    for line in expected:
        assert any(one.startswith(f"hpc3d.train: {line}") for one in found)
    assert done.returncode == 2
    assert not re.search("MPI_ABORT|Traceback", done.stderr)
    assert not done.stdout
    assert not out.exists()


# Faults


def processes(word):
    """The command lines of all processes that hold `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [command] if word in command else []
    return found


def gone(word, within=3):
    """Whether all processes that hold `word` are gone after a moment."""
    end = time.monotonic() + within
    while processes(word) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes(word)


def faulty(fault, ranks, out, **values):
    """A job with a fault, how long it lived on after it, and what its trace says."""
    name = f"fault-{uuid.uuid4().hex}"
    line = words(out, name=name, train__steps=1000, **values)
    done = mpirun(ranks, "-m", "tests.faulty_train", fault, *line, timeout=200)
    ended = time.time()
    begin = float(re.search(r"fault at ([\d.]+)", done.stdout)[1])
    assert gone(name)
    with hpc3d.trace.open(merge(newest(out))) as trace:
        steps = {rank: trace.steps["step"][trace.steps["rank"] == rank] for rank in range(ranks)}
        present = set(np.unique(trace.events["rank"]).tolist())
        missing = trace.attrs["missing"]
    return done, ended - begin, steps, present, missing


@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize("ranks", EIGHT_AND_64)
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("raise", 1, "KeyError: 'a message of one rank'\n"),
        ("exit", 3, "hpc3d.train: rank {last} exited with 3\n"),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_leaves_a_trace(
    fault, code, message, ranks, transport, tmp_path
):
    done, lasted, steps, present, missing = faulty(
        fault, ranks, tmp_path, mesh__transport=transport
    )
    last = ranks - 1
    assert lasted < 10
    assert done.returncode == code
    (line,) = said(done)
    assert line.startswith(f"hpc3d.train: rank {last} ")
    assert done.stderr.count(message.format(last=last)) == 1
    assert last in present
    assert steps[last].tolist() == [0, 1]
    assert_all_accounted_for(ranks, present, missing)


@pytest.mark.parametrize("ranks", EIGHT_AND_64)
def test_a_rank_that_is_killed_ends_the_job_and_leaves_a_trace(ranks, tmp_path):
    done, lasted, steps, present, missing = faulty("kill", ranks, tmp_path)
    assert lasted < 10
    assert done.returncode == 128 + 9
    assert steps[ranks - 1].tolist() == [0, 1]
    assert present == set(range(ranks))
    assert_all_accounted_for(ranks, present, missing)


def assert_all_accounted_for(ranks, present, missing):
    """Every rank is in the trace, or the trace says that it is not."""
    absent = {int(rank) for rank in re.findall(r"rank (\d+): no segment", missing)}
    assert present | absent == set(range(ranks))
    assert not present & absent


def test_ranks_write_what_they_have_when_the_launcher_is_told_to_end(tmp_path):
    done, lasted, steps, present, _ = faulty("end the launcher", 2, tmp_path)
    assert lasted < 10
    assert done.returncode != 0
    assert present == {0, 1}
    assert all(len(steps[rank]) >= 2 for rank in range(2))


# What a run leaves


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 ranks, with a secret in its environment."""
    out = tmp_path_factory.mktemp("out")
    line = words(out, name="eight", train__steps=3)
    secret = {"SOME_TOKEN": "do-not-write-this"}
    stdout = checked(8, "-m", "hpc3d.train", *line, environment=secret)
    return newest(out), stdout


def test_a_run_folder_says_what_was_run(run):
    path, stdout = run
    assert re.fullmatch(r"eight-\d{8}-\d{6}", path.name)
    assert {entry.name for entry in path.iterdir()} == {
        "config.toml",
        "command.txt",
        "environment.json",
        "train.log",
        "trace",
        "trace.h5",
    }
    config = load(path / "config.toml", [])
    assert config == settle(load(None, words(path.parent, name="eight", train__steps=3)), 8)
    assert "--train.steps 3" in (path / "command.txt").read_text()
    assert (path / "train.log").read_text() == stdout


def test_the_environment_has_versions_and_ranks_and_no_secret(run):
    path, _ = run
    environment = json.loads((path / "environment.json").read_text())
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["hpc3d"] == hpc3d.__version__
    assert [place["local_rank"] for place in environment["ranks"]] == list(range(8))
    assert len({place["pid"] for place in environment["ranks"]}) == 8
    files = [entry for entry in path.rglob("*") if entry.is_file()]
    assert not any(b"do-not-write-this" in entry.read_bytes() for entry in files)


def test_the_log_has_a_line_a_step(run):
    path, _ = run
    lines = (path / "train.log").read_text().splitlines()
    steps = [line.split() for line in lines if re.match(r" +\d+ ", line)]
    assert [line[0] for line in steps] == ["0", "1", "2"]
    assert "first step after" in lines[-4]
    assert lines[-1] == f"run kept in {path}"
    with hpc3d.trace.open(path / "trace.h5") as trace:
        losses = trace.steps["loss"][:3]
    assert [line[1] for line in steps] == [f"{loss:.4f}" for loss in losses]


def test_the_trace_has_all_ranks_and_their_calls_match(run):
    path, _ = run
    with hpc3d.trace.open(path / "trace.h5") as trace:
        assert trace.attrs["complete"]
        assert tomllib.loads(trace.attrs["config"])["model"]["hidden"] == 144
        events = {name: trace.events[name] for name in ("rank", "group", "seq", "op", "step")}
        groups = trace.groups
    assert set(events["rank"]) == set(range(8))
    calls = defaultdict(list)
    for group, seq, rank, op in zip(*(events[key] for key in ("group", "seq", "rank", "op"))):
        if group >= 0:
            calls[group, seq].append((rank, op))
    assert {group for group, _ in calls} == set(range(len(groups)))
    for (group, _), members in calls.items():
        assert tuple(sorted(rank for rank, _ in members)) == groups[group].members
        assert len({op for _, op in members}) == 1


def test_every_rank_has_every_step_with_the_same_loss(run):
    path, _ = run
    with hpc3d.trace.open(path / "trace.h5") as trace:
        rows = list(zip(*(trace.steps[key] for key in ("rank", "step", "loss", "grad_norm"))))
    assert [row[:2] for row in rows] == [(rank, step) for rank in range(8) for step in range(3)]
    assert len({row[1:] for row in rows}) == 3


def test_a_run_without_a_trace(tmp_path):
    path = train(2, tmp_path, train__steps=1, trace__enabled="false")
    assert not list((path / "trace").iterdir())
    assert not (path / "trace.h5").exists()


def test_folders_of_one_second_do_not_overwrite_each_other(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("ranks", [1, 3, 7, pytest.param(64, marks=slow)])
def test_the_one_command_needs_no_input_and_no_place(ranks, tmp_path):
    out = checked(ranks, "-m", "hpc3d.train", "--train.steps", "1", cwd=tmp_path, timeout=200)
    (path,) = (tmp_path / "results").iterdir()
    assert f"run kept in {path}" in out
    assert f"\n{ranks} ranks: " in out
    assert re.search(r"^ +0 +\d\.\d{4} ", out, re.MULTILINE)


def test_help_is_the_text_of_the_command():
    out = checked(2, "-m", "hpc3d.train", "--help")
    assert out.count("mpirun -np N python -m hpc3d.train [INPUT.toml]") == 1


def test_the_defaults_are_those_of_the_shipped_input():
    shipped = Path(run_folder.__file__).parents[2] / "inputs" / "gpt-3d-64.toml"
    config = load(shipped, [])
    assert (config.train, config.data) == (Config().train, Config().data)


# Equal losses


def losses(path):
    with hpc3d.trace.open(path / "trace.h5") as trace:
        mine = trace.steps["rank"] == 0
        assert (np.diff(trace.steps["step"][mine]) == 1).all()
        return trace.steps["loss"][mine]


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The losses of 20 steps on one rank."""
    found = losses(train(1, tmp_path_factory.mktemp("serial"), train__steps=20))
    assert len(found) == 20
    assert found[-1] < found[0] - 1
    return found


@pytest.mark.parametrize(
    "cuboid",
    [
        (2, 2, 2),
        (2, 3, 2),
        pytest.param((3, 3, 3), marks=slow),
        pytest.param((4, 4, 4), marks=slow),
    ],
    ids=str,
)
def test_twenty_steps_have_the_same_losses_on_any_cuboid(cuboid, serial, tmp_path):
    mesh = {f"mesh__{axis}": size for axis, size in zip("xyz", cuboid)}
    path = train(int(np.prod(cuboid)), tmp_path, 280, train__steps=20, **mesh)
    np.testing.assert_allclose(losses(path), serial, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_the_same_losses(scheme, serial, tmp_path):
    path = train(8, tmp_path, train__steps=8, parallel__scheme=scheme)
    np.testing.assert_allclose(losses(path), serial[:8], rtol=0, atol=1e-9)


def test_a_data_axis_and_mpi_have_the_same_losses(serial, tmp_path):
    how = {"mesh__d": 2, "mesh__transport": "mpi", "parallel__keep_gathered": "false"}
    path = train(8, tmp_path, train__steps=8, **how)
    np.testing.assert_allclose(losses(path), serial[:8], rtol=0, atol=1e-9)


def test_another_seed_has_other_losses(serial, tmp_path):
    path = train(1, tmp_path, train__steps=2, seed=4321)
    assert np.abs(losses(path) - serial[:2]).min() > 1e-6
