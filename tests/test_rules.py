"""Every rule by the line that it prints, and the best cuboid."""

from math import prod

import pytest

from hpc3d.config import Config, load
from hpc3d.rules import misfits, settle, words
from tests.inputs import problems

RULES = {
    "seed": ("-1", "seed = -1: must be at least 0 and below"),
    "name": ("a/b", "name = 'a/b': names a folder; use letters"),
    "mesh.x": ("0", "mesh.x = 0: must be at least 1"),
    "mesh.d": ("-2", "mesh.d = -2: must be at least 1"),
    "mesh.p": ("2", "mesh.p = 2: not there yet; use 1"),
    "mesh.c": ("2", "mesh.c = 2: not there yet; use 1"),
    "mesh.e": ("2", "mesh.e = 2: not there yet; use 1"),
    "mesh.order": ("x y z", "mesh.order = 'x y z': must name each of p d c e x y z once"),
    "mesh.transport": ("tcp", "mesh.transport: input should be 'auto' or 'mpi', not 'tcp'"),
    "parallel.scheme": ("4d", "parallel.scheme: input should be '1d', '1d-sequence',"),
    "parallel.zero": ("1", "parallel.zero = 1: not there yet; use 0"),
    "parallel.microbatches": ("2", "parallel.microbatches = 2: not there yet; use 1"),
    "parallel.chunks": ("0", "parallel.chunks = 0: not there yet; use 1"),
    "parallel.recompute": ("full", "parallel.recompute = 'full': not there yet; use 'none'"),
    "parallel.schedule": ("1f1b", "parallel.schedule = '1f1b': not there yet; use 'none'"),
    "model.layers": ("0", "model.layers = 0: must be at least 1"),
    "model.hidden": ("0", "model.hidden = 0: must be at least 1"),
    "model.heads": ("0", "model.heads = 0: must be at least 1"),
    "model.sequence": ("0", "model.sequence = 0: must be at least 1"),
    "model.vocabulary": ("0", "model.vocabulary = 0: must be at least 1"),
    "model.dropout": ("1", "model.dropout = 1.0: must be at least 0 and below 1"),
    "model.kind": ("bert", "model.kind: input should be 'gpt2', not 'bert'"),
    "train.steps": ("0", "train.steps = 0: must be at least 1"),
    "train.batch": ("0", "train.batch = 0: must be at least 1"),
    "train.warmup": ("-1", "train.warmup = -1: must be at least 0"),
    "train.learning_rate": ("nan", "train.learning_rate = nan: must be at least 0"),
    "train.weight_decay": ("-0.1", "train.weight_decay = -0.1: must be at least 0"),
    "train.clip": ("inf", "train.clip = inf: must be at least 0 and below inf"),
    "train.backend": ("cupy", "train.backend = 'cupy': not there yet; use 'numpy'"),
    "checkpoint.every": ("5", "checkpoint.every = 5: not there yet; use 0"),
    "checkpoint.keep": ("0", "checkpoint.keep = 0: must be at least 1"),
    "run.watchdog_s": ("0", "run.watchdog_s = 0.0: must be at least 0.1"),
}


@pytest.mark.parametrize("key", RULES)
def test_a_value_out_of_range_is_refused(key):
    value, line = RULES[key]
    (said,) = problems(f"--{key}", value)
    assert said.startswith(line)


SIZES = {"--model.hidden": 144, "--model.heads": 24, "--train.batch": 144}
ON_2_2_2 = ["--mesh.x", "2", "--mesh.y", "2", "--mesh.z", "2"]


def sized(changes, *more):
    flat = [str(part) for item in {**SIZES, **changes}.items() for part in item]
    return [*flat, *more]


@pytest.mark.parametrize(
    ("changes", "mesh", "lines"),
    [
        (
            {"--train.batch": 142},
            {"x": 2, "y": 4},
            ["train.batch = 142 does not divide over mesh axes x 2 x y 4 = 8"],
        ),
        (
            {"--train.batch": 142},
            {"x": 2, "z": 4},
            ["train.batch = 142 does not divide over mesh axes x 2 x z 4 = 8"],
        ),
        ({"--model.heads": 18}, {"y": 4, "x": 2}, ["model.heads = 18", "over mesh axes y 4 = 4"]),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"z": 8},
            ["model.hidden = 150 does not divide over mesh axes z 8 = 8: use a multiple of 8"],
        ),
        (
            {"--model.hidden": 150, "--model.heads": 25},
            {"x": 8},
            ["model.hidden = 150 does not divide over mesh axes x 8 = 8: use a multiple of 8"],
        ),
        (
            {"--model.heads": 25},
            {"x": 8},
            ["model.hidden = 144 does not divide by model.heads = 25: change one of them"],
        ),
    ],
)
def test_a_size_that_does_not_divide_names_key_and_axes(changes, mesh, lines):
    axes = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", str(size))]
    said = problems(*sized(changes, *axes))
    assert all(any(line in one for one in said) for line in lines)
    assert all(
        one.split(" = ")[0] in ("train.batch", "model.heads", "model.hidden") for one in said
    )


def test_a_wrong_number_of_ranks_names_each_factor():
    (said,) = problems(*sized({}, "--mesh.d", "3", *ON_2_2_2), ranks=64)
    assert said == (
        "mesh: d 3 x x 2 x y 2 x z 2 = 24 ranks, but 64 were started: change [mesh] or start 24"
    )


def test_an_axis_that_the_scheme_does_not_use_is_refused():
    said = problems(*sized({}, *ON_2_2_2, "--parallel.scheme", "2d"))
    assert said == ["mesh.z = 2: the scheme does not split along z; use 1"]


def test_a_model_that_fits_no_cuboid_says_what_to_set():
    (said,) = problems(*sized({}), ranks=7)
    assert said.startswith("mesh: no cuboid of 7 ranks divides this model under scheme 3d: set")


@pytest.mark.parametrize(
    ("letters", "line"),
    [
        ('{ m = "x", o = "y" }', "parallel.split.o: unknown key; known here: m, n, k, replicate"),
        ('{ m = "w" }', "parallel.split.m: no tensor axis 'w'; there are x, y and z"),
        ('{ m = "x", n = "x" }', "parallel.split: axis x splits more than one loop"),
    ],
)
def test_a_split_of_letters_is_checked(letters, line):
    (said,) = problems("--parallel.split", letters)
    assert said.startswith(line)


def test_a_split_of_letters_is_taken():
    config = settle(load(None, sized({}, "--parallel.split", '{ m = "x" }')), 8)
    assert config.split().m == "x"
    assert config.mesh.sizes()["x"] == 8


@pytest.mark.parametrize("ranks", [*range(1, 71), 100, 128])
def test_the_default_model_settles_on_any_number_of_ranks(ranks):
    config = settle(load(None, []), ranks, default=True)
    assert prod(config.mesh.sizes().values()) == ranks
    assert config.model.hidden % config.model.heads == 0
    assert not misfits(config, ranks)


def test_a_default_that_the_user_changed_does_not_grow():
    changed = load(None, ["--model.hidden", "128"])
    with pytest.raises(ValueError, match="no cuboid of 7 ranks"):
        settle(changed, 7, default=True)
    assert settle(load(None, []), 64, default=True).model == Config().model


def test_the_best_cuboid_moves_the_fewest_words():
    """[MK (n-1) + KN (m-1) + MN (k-1)] / P for the four products of a block, by hand."""

    def by_hand(config):
        sizes, hidden = config.mesh.sizes(), config.model.hidden
        m, n, k = sizes["x"], sizes["y"], sizes["z"]
        rows, total = config.train.batch * config.model.sequence, 0
        for width, height, (a, b) in (
            (hidden, 3 * hidden, (n, k)),
            (hidden, hidden, (k, n)),
            (hidden, 4 * hidden, (n, k)),
            (4 * hidden, hidden, (k, n)),
        ):
            total += rows * width * (a - 1) + width * height * (m - 1) + rows * height * (b - 1)
        return total / (m * n * k)

    def on(x, y, z):
        return settle(load(None, sized({"--mesh.x": x, "--mesh.y": y, "--mesh.z": z})), x * y * z)

    best = settle(load(None, sized({})), 8)
    cuboids = [on(x, y, 8 // (x * y)) for x in (1, 2, 4, 8) for y in (1, 2, 4, 8) if x * y <= 8]
    assert by_hand(best) == min(map(by_hand, cuboids)) < max(map(by_hand, cuboids))
    assert [words(config) for config in cuboids] == pytest.approx(list(map(by_hand, cuboids)))
