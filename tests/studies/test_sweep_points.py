"""Points of a study: combinations of the axes, names, and rejected input."""

import re
from pathlib import Path

import pytest

from hpc3d.console.sanitize import lines_of
from hpc3d.studies.sweep_points import MOST_POINTS, points_of

MODEL = """
[model]
layers = 1
hidden = 32
heads = 4
sequence = 8
[train]
batch = 8
steps = 3
"""
AXES = """
[sweep]
ranks = 2
model.hidden = [32, 64]
layouts = [
    { label = "1-D", parallel.scheme = "1d", mesh.x = 2, mesh.y = 1, mesh.z = 1 },
    { mesh = { d = 2 } },
]
"""


@pytest.fixture
def of(tmp_path):
    """Return a function that creates the points of a study file with given text and options."""

    def points(sweep, *words, more=""):
        path = tmp_path / "study.toml"
        path.write_text(more + MODEL + sweep)
        return points_of(path, words)

    return points


def test_points_are_all_combinations_of_the_axes(of):
    found = of(AXES + "seed = [1, 2]\nrepetitions = 2")
    assert [point.number for point in found] == [*range(16)]
    assert found[0].values == {"ranks": 2, "model.hidden": 32, "layouts": "1-D", "seed": 1}
    last = found[-1]
    assert (last.values["layouts"], last.repetition, last.ranks) == ("d=2", 1, 2)
    assert (last.config.model.hidden, last.config.seed, last.config.mesh.d) == (64, 2, 2)
    assert len({point.key for point in found}) == 16
    assert found[0].name == f"ranks2-hidden32-layouts1-D-seed1-{found[0].key}"
    assert str(last) == "ranks=2 model.hidden=64 layouts=d=2 seed=2 repetition=1"


def test_options_replace_axes_and_keys(of):
    words = ["--sweep.model.hidden", "16,48", "--sweep.parallel.scheme=1d,3d"]
    words += ["--train.steps", "5", "--sweep.ranks", "1"]
    found = of("[sweep]\nmodel.hidden = [64]", *words)
    got = [(each.config.model.hidden, each.config.parallel.scheme) for each in found]
    assert got == [(16, "1d"), (16, "3d"), (48, "1d"), (48, "3d")]
    assert {each.config.train.steps for each in found} == {5}


def test_key_depends_only_on_what_affects_the_result(of):
    def keys(*words, table=AXES):
        return {point.key for point in of(table, *words)}

    assert keys() == keys(table=AXES.replace("1-D", "Megatron").replace("layouts", "ways"))
    assert keys() == keys("--name", "other", "--run.watchdog_s", "9")
    assert keys() < keys("--sweep.model.hidden", "128,64,32")
    assert keys() < keys("--sweep.repetitions", "2")
    assert not keys() & keys("--train.steps", "4")
    assert not keys() & keys("--sweep.machine", "h100")


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("model.hiden = [1]", "sweep.model.hiden: unknown key; did you mean model.hidden?"),
        ("seed = []", "sweep.seed: the list is empty; add a value, or remove the axis"),
        ("seed = [1, 1]", "sweep.seed: 1 occurs twice; remove one of them"),
        ("a = [{ mesh.w = 2 }]", "sweep.a: mesh.w: unknown key; use one of p"),
        ("loss = [{ mesh.d = 2 }]", "sweep.loss: this name is reserved or invalid"),
        ('a = [{label = "b", seed = 1}, {label = "b", seed = 2}]', "sweep.a: two tables have the"),
        ("seed = 1\na = [{ seed = 2 }]", "sweep.seed and sweep.a both set seed; remove one"),
        ("repetitions = 0", "sweep.repetitions = 0: must be a positive integer"),
        (f"seed = 1\nrepetitions = {MOST_POINTS + 1}", f"sweep: {MOST_POINTS + 1} points, but"),
        ('name = ["a", "b"]\nranks = 1', "sweep: name and run.* do not change a result"),
        ("ranks = 0", "ranks = 0: must be an integer from 1 to "),
        ('ranks = 1\nmachine = "h10"', "machine = h10: no such machine"),
        ("seed = 1", "the number of ranks is unknown; set sweep.ranks, or mesh.x"),
        ("ranks = 1\ntrace.enabled = false", "trace.enabled = false"),
        ("seed = 1999-01-01\nranks = 1", "seed: input should be a valid integer"),
        ("a = [{ b.zzzz = 1 }]", "sweep.a: b.zzzz: unknown key; use one of name, seed, mesh,"),
        ("", "study.toml: no axes; add a table [sweep], or options --sweep.KEY A,B,C"),
    ],
)
def test_wrong_axis_is_refused_in_one_line(table, line, of):
    with pytest.raises(ValueError) as refused:
        of(f"[sweep]\n{table}")
    (found,) = lines_of(refused.value)
    assert line in found


def test_table_of_another_type_is_refused(of):
    with pytest.raises(ValueError, match=r"sweep: must be a table; write its keys below a line"):
        of("", more="sweep = 3\n")


def test_every_invalid_point_is_refused_and_seeds_are_not_repeated(of):
    with pytest.raises(ValueError) as refused:
        of("[sweep]\nranks = 4\nseed = [1, 2]\nmodel.hidden = [32, 33, 34]\nbad.key = 1")
    assert [line.split(":")[0] for line in lines_of(refused.value)] == ["sweep.bad.key"]
    with pytest.raises(ValueError) as refused:
        of("[sweep]\nranks = 4\nseed = [1, 2]\nmodel.hidden = [32, 33, 34]")
    lines = lines_of(refused.value)
    wrong = ["ranks=4 model.hidden=33", "ranks=4 model.hidden=34"]
    assert [line.split(": ")[0] for line in lines] == wrong


def test_error_in_all_points_is_reported_once(of):
    with pytest.raises(ValueError) as refused:
        of("[sweep]\nranks = [1, 2]", "--train.stepz", "3", "--model.heads", "5")
    assert [line.split(":")[0] for line in lines_of(refused.value)] == [
        "train.stepz",
        "model.hidden = 32 must be divisible by model.heads = 5; change one of them",
    ]


def test_examples_on_the_page_are_valid(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "sweep.md"
    counts = []
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / "study.toml").write_text(text)
        counts.append(len(points_of(tmp_path / "study.toml", [])))
    assert counts == [18, 15]
