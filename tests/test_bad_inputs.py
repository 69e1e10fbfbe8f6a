"""Hundreds of generated invalid inputs: each is rejected with lines that state the problem,
without a traceback, a hang, or exit code 0."""

import json
import os
import re
import shutil
from math import prod
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc3d.trace
from hpc3d import plan, prepare, report, simulate
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.config.input_file import Config
from hpc3d.config.load import flat, load
from hpc3d.config.resolve import resolve
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.file import REMEDY
from tests.elided import elided
from tests.mpi import mpirun
from tests.runs import ended, plan_of, said
from tests.runs import train as run_of
from tests.strided import strided

SHIPPED = sorted((Path(__file__).parent.parent / "inputs").glob("*.toml"))
MACHINE = Path(__file__).parent.parent / "inputs" / "machines" / "h100.toml"

# What no key of a type takes.
WRONG = {
    int: ["abc", "1.5", "-1", "[1]", "{a=1}", "nan", "''", "1e400", "9" * 5000],
    float: ["abc", "nan", "inf", "-1", "[1.0]", "{a=1}", "''", "2020-01-01", "9" * 5000],
    bool: ["1", "yes", "[true]", "''", "nan"],
    str: ["[1]", "{a=1}", "nan", "1", "true"],
    tuple: ["1", "x", "{a=1}", "[1]"],
    type(None): ["{a=1}", "nan", "[[1]]", "-0.5"],
}
DEEP = "a=" + "[" * 5000


def refused(words):
    """Return the lines with which rank 0 rejects a command line, or None if it does not."""
    try:
        plan_of(words)
    except ValueError as error:
        return str(error).splitlines()
    return None


def said_well(lines):
    return bool(lines) and all(line.strip() and len(line) < 500 for line in lines)


def wrong_values():
    values = flat(Config())
    del values["run.out"]  # given below
    pairs = [(key, bad) for key in values for bad in WRONG[type(values[key])]]
    return [pair for pair in pairs if pair != ("parallel.recompute", "[1]")]  # which are layers


@pytest.mark.parametrize("part", strided(range(4), 4))
def test_every_key_rejects_values_of_other_types(part, tmp_path):
    cases = wrong_values()[part::4]
    assert len(cases) > 50
    for key, bad in cases:
        lines = refused([f"--{key}={bad}", "--run.out", tmp_path])
        assert said_well(lines), (key, bad[:20], lines)
        assert any(key in line for line in lines), (key, bad[:20], lines)
    assert not list(tmp_path.iterdir())


FAR = str(10**30)  # beyond what NumPy counts in
LONG = "a" * 5000  # no file has such a name
ENDLESS = "/dev/zero"
BEYOND = [
    ["--model.hidden", "1000000000000", "--model.heads", "1"],
    ["--model.vocabulary", str(2**62)],
    ["--model.layers", "1000000000"],
    ["--train.batch", "1000000000000"],
    ["--train.batch", FAR],
    ["--parallel.microbatches", "1000000", "--train.batch", "1000000"],
    ["--parallel.schedule", f"csv:{ENDLESS}"],
    ["--data.path", ENDLESS],
    ["--data.path", LONG],
    ["--resume", LONG],
    ["--name", f"/{LONG}"],
    ["--parallel.schedule", LONG],
    ["--parallel.split", f'{{m="{LONG}"}}'],
    [ENDLESS],
    ["--" + "a." * 20_000 + "a", "1"],
]


@pytest.mark.parametrize("words", BEYOND, ids=lambda words: " ".join(words)[:40])
def test_unbounded_values_are_rejected_in_one_line(words, tmp_path):
    lines = refused([*words, "--run.out", tmp_path])
    assert said_well(lines), lines
    assert not list(tmp_path.iterdir())


def test_pipe_is_rejected_where_a_file_is_read(tmp_path, capsys):
    os.mkfifo(pipe := tmp_path / "pipe")
    lines = refused([str(pipe), "--run.out", tmp_path / "none"])
    assert re.match(f"{pipe} .* a regular file", *lines)
    assert said_well(refused(["--parallel.schedule", f"csv:{pipe}"]))
    words = ["schedule", "--name", f"csv:{pipe}", "--stages", "1", "--microbatches", "1"]
    assert simulate.main(words) == 2
    assert simulate.main([str(SHIPPED[0]), "--machine", str(pipe)]) == 2
    assert ended(plan.main, pipe, "--ranks", "4") == 2
    assert ended(report.main, pipe) == 2
    assert capsys.readouterr().err.count("\n") == 4


@pytest.mark.parametrize("ranks", ["1000000007", "9" * 5000, "\u0663", "0", "-1", "1e3"])
def test_number_of_ranks_is_bounded(ranks, capsys):
    for verb in (plan, simulate):
        assert ended(verb.main, SHIPPED[0], "--machine", MACHINE, f"--ranks={ranks}") == 2
        assert said_well(capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("option", ["--forward", "--backward", "--weight", "--comm"])
@pytest.mark.parametrize("seconds", ["1e308", "5e-324", "1e9", "1e-12", "inf", "9" * 5000])
def test_schedule_times_are_bounded(option, seconds, capsys):
    sizes = ["--name", "zb-h1", "--stages", "4", "--microbatches", "8"]
    code = ended(simulate.main, "schedule", *sizes, option, seconds, "--json")
    error = capsys.readouterr().err
    assert code == (0 if seconds in ("1e9", "1e-12") else 2)
    assert not code or said_well(error.splitlines())


def test_mesh_order_with_unknown_axes_is_rejected(capsys):
    words = [SHIPPED[0], "--machine", MACHINE, "--mesh.order", LONG]
    assert ended(simulate.main, *words) == 2
    assert "mesh.order = 'aaa" in (error := capsys.readouterr().err)
    assert said_well(error.splitlines())


@pytest.mark.parametrize("size", strided(["5e-324", "0", "1e300"], 3))
def test_plan_accepts_any_bucket_size(size, capsys):
    words = [SHIPPED[0], "--machine", MACHINE, "--ranks", "2", "--model.layers", "2"]
    words += ["--parallel.bucket_mb", size]
    assert ended(plan.main, *words) == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [BEYOND[0], ["--data.path", LONG], ["--resume", LONG]])
def test_two_ranks_reject_input_together(words, tmp_path):
    done = mpirun(2, "-m", "hpc3d.train", *words, "--run.out", tmp_path)
    (line,) = said(done)
    assert done.returncode == 2 and said_well([line]) and "Traceback" not in done.stderr


KEYS = st.sampled_from([key for key in flat(Config()) if key != "data.path"])
VALUES = st.one_of(
    st.text(max_size=9),
    st.integers(-2, 9).map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.sampled_from([name for values in WRONG.values() for name in values]),
    st.sampled_from(["true", "adamw", "1f1b", "zb-v", "pipedream", '\'{m="x",own="y"}\'', "2d"]),
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=4), st.sampled_from([1, 2, 8, 12]))
def test_any_options_are_accepted_or_rejected(options, ranks):
    try:
        config = resolve(load(None, [f"--{key}={value}" for key, value in options]), ranks, True)
    except ValueError as error:
        assert said_well(str(error).splitlines()), str(error)
    else:
        assert prod(config.sizes().values()) == ranks


def damaged(text, chance):
    """Return a byte text with a few changes."""
    content = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content))
        change = chance.choice(["flip", "drop", "double", "garbage"])
        if change == "flip":
            content[place] ^= 1 << chance.randrange(8)
        elif change == "drop":
            del content[place : place + chance.randint(1, 40)]
        elif change == "double":
            content[place:place] = content[place : place + chance.randint(1, 40)]
        else:
            content[place:place] = bytes(chance.randrange(256) for _ in range(5))
    return bytes(content)


def test_damaged_input_files_are_rejected(chance, tmp_path):
    path, bad = tmp_path / "input.toml", 0
    texts = [damaged(chance.choice(SHIPPED).read_bytes(), chance) for _ in range(200)]
    for text in [*texts, DEEP.encode(), b"a = " + b"9" * 5000, b"\0", b"\xff\xfe", b"[mesh"]:
        path.write_bytes(text)
        lines = refused([path, "--run.out", tmp_path / "none"])
        shutil.rmtree(tmp_path / "none", ignore_errors=True)
        bad += lines is not None
        assert lines is None or said_well(lines), (text, lines)
    assert bad > 150


@pytest.mark.parametrize("verb", [simulate, pytest.param(plan, marks=pytest.mark.slow)])
def test_commands_without_ranks_reject_invalid_input(verb, chance, tmp_path, capsys):
    path = tmp_path / "input.toml"
    ranks = ["--ranks", "64"] if verb is plan else []
    cases = [(f"--{key}", bad) for key, bad in wrong_values() if not bad.startswith("-")]
    for key, value in cases:
        path.write_bytes(chance.choice(SHIPPED).read_bytes())
        code = ended(verb.main, path, "--machine", MACHINE, *ranks, key, value)
        error = capsys.readouterr().err
        assert code == 2 and said_well(error.splitlines()), (key, value[:20], error)
    for text in (b"", b"\xff", DEEP.encode()):
        path.write_bytes(text)
        assert ended(verb.main, SHIPPED[0], "--machine", path, *ranks) == 2
        assert said_well(capsys.readouterr().err.splitlines())


def test_damaged_texts_and_token_files_are_rejected(chance, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Words and more words, again and again.\n" * 40, encoding="utf-8")
    good = tmp_path / "good.h5"
    assert ended(prepare.main, text, "-o", good) == 0
    content, bad = good.read_bytes(), 0
    for number in range(60):
        path = tmp_path / f"{number}.h5"
        path.write_bytes(damaged(content, chance) if number % 2 else content[: number * 60])
        capsys.readouterr()
        code = ended(prepare.main, "--verify", path)
        error = capsys.readouterr().err
        assert code == 0 or (code in (2, 3) and said_well(error.splitlines())), (number, error)
        bad += code != 0
        lines = refused(["--data.path", path, "--run.out", tmp_path / "none"])
        shutil.rmtree(tmp_path / "none", ignore_errors=True)
        assert lines is None or said_well(lines), lines
    assert bad > 40


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run of two ranks with a checkpoint and a trace."""
    out = tmp_path_factory.mktemp("run")
    return run_of(2, out, train__steps=2, checkpoint__every=2, model__layers=1)


@pytest.mark.slow
def test_damaged_traces_are_rejected(run, chance, tmp_path, capsys):
    content, bad = (run / "trace.h5").read_bytes(), 0
    for number in range(40):
        path = tmp_path / f"{number}.h5"
        path.write_bytes(content[: number * 997] if number % 2 else damaged(content, chance))
        code = ended(report.main, path, "--tables", "--out", tmp_path / "report")
        error = capsys.readouterr().err
        assert code == 0 or (code == 2 and said_well(error.splitlines())), (number, error)
        bad += code != 0
    assert bad > 20


# What a manifest may hold instead of what belongs there.
ODD = [None, -1, 1 << 70, "", "../x", [], {}, [[]], 1.5, "x" * 1000, [None], {"a": 1}, True]


@pytest.mark.slow
def test_damaged_checkpoints_are_rejected(run, chance, tmp_path):
    bad = 0
    (whole,) = (run / "checkpoints").glob("step-*")
    manifest = json.loads((whole / "manifest.json").read_text(encoding="utf-8"))
    for number in range(120):
        folder = tmp_path / f"step-{number:08d}"
        shutil.copytree(whole, folder)
        if number % 3:
            spoil(folder / "manifest.json", manifest, chance)
        else:
            path = chance.choice(sorted(folder.iterdir()))
            path.write_bytes(damaged(path.read_bytes(), chance))
        bad += is_bad(folder, number)
        shutil.rmtree(folder)
    assert bad > 80


FAR_AWAY = [2**62 - 1, 10**40, 2**53, -1, 1.5, "1", None, [1]]


@pytest.mark.parametrize("value", FAR_AWAY, ids=str)
@pytest.mark.parametrize("key", ["step", "updates", "sequences", "epoch"])
@pytest.mark.slow
def test_manifest_counts_are_bounded(run, tmp_path, key, value):
    (whole,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(whole, folder := tmp_path / whole.name)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    (manifest["position"] if key in ("sequences", "epoch") else manifest)[key] = value
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"json: (position\.)?{key} .*9007199254740992"):
        Checkpoint(folder)


@pytest.mark.parametrize("column", ["events/t_global", "events/t_start", "steps/t_end"])
@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 2**60 + 1])
@pytest.mark.slow
def test_trace_times_are_bounded(run, tmp_path, capsys, column, value):
    shutil.copy(run / "trace.h5", path := tmp_path / "trace.h5")
    with h5py.File(path, "r+") as file:
        file[column][0] = value
    assert ended(report.main, path, "--tables", "--out", tmp_path / "report") in (0, 2)
    with hpc3d.trace.open(path) as trace:
        damages = violations(trace)
    assert re.fullmatch(elided(f"{path}: {column} ... {value}; {REMEDY}"), *damages)


def spoil(path, manifest, chance):
    """Write a manifest in which one value is changed."""
    tree = json.loads(json.dumps(manifest))
    node, key = chance.choice([*places(tree)])
    node[key] = chance.choice(ODD)
    path.write_text(json.dumps(tree), encoding="utf-8")


def places(tree):
    """Yield (container, key) of every value in a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def is_bad(folder, number):
    """Return True if a checkpoint is rejected, with one line; otherwise, read all of it."""
    try:
        opened = Checkpoint(folder)
        if line := opened.damage():
            assert said_well([line]), (number, line)
            return True
        for (name, kind), found in opened.sources.items():
            for elements, part in found:
                opened.fill(np.empty_like(elements), name, kind, part)
    except ValueError as error:
        assert said_well(str(error).splitlines()), (number, error)
        return True
    return False
