"""The input file: every rule by the line that it prints, overrides, and the best cuboid."""

import tomllib
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc3d.config import Config, MeshConfig, known_keys, load, to_toml
from hpc3d.rules import misfits, settle, words

SHIPPED = Path(__file__).parent.parent / "inputs" / "gpt-3d-64.toml"


def problems(*options, ranks=8, text="", folder=None):
    """The lines that a file with `text` and the command line `options` are refused with."""
    path = None
    if text:
        path = folder / "input.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as refused:
        settle(load(path, options), ranks)
    return str(refused.value).splitlines()


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


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("train.steps", "many", "train.steps: input should be a valid integer, not 'many';"),
        ("train.steps", "2.5", "train.steps: input should be a valid integer, not 2.5;"),
        ("train.steps", "true", "train.steps: input should be a valid integer, not True;"),
        ("train.steps", '"20"', "train.steps: input should be a valid integer, not '20';"),
        ("train.clip", "[1]", "train.clip: input should be a valid number, not [1];"),
        ("model.tied", "1", "model.tied: input should be a valid boolean, not 1;"),
        ("data.path", "5", "data.path: input should be a valid string, not 5;"),
        ("mesh", "8", "mesh: input should be an object, not 8;"),
        ("seed", "2025-01-02", "seed: input should be a valid integer, not '2025-01-02';"),
    ],
)
def test_a_wrong_type_is_refused(option, value, line):
    (said,) = problems(f"--{option}", value)
    assert said.startswith(line)
    assert said.endswith("correct the value")


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("train.stepz", "train.stepz: unknown key; did you mean train.steps?"),
        ("steps", "steps: unknown key; did you mean train.steps?"),
        ("run.name", "run.name: unknown key; did you mean name?"),
        ("modell", "modell: unknown key; did you mean model?"),
        ("run.qqq", "run.qqq: unknown key; known here: run.out, run.watchdog_s"),
    ],
)
def test_an_unknown_key_is_refused_with_the_full_name_of_a_near_one(option, line):
    assert problems(f"--{option}", "1") == [line]


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


def test_all_errors_are_said_at_once(tmp_path):
    text = "stepz = 1\n[train]\nsteps = 'a'\nbatch = 1.5\n[modell]\n[mesh]\nq = 2\n"
    said = problems(text=text, folder=tmp_path)
    assert sorted(line.split(":")[0] for line in said) == [
        "mesh.q",
        "modell",
        "stepz",
        "train.batch",
        "train.steps",
    ]
    said = problems("--seed", "-1", "--train.steps", "0", "--mesh.p", "2")
    assert [line.split(" = ")[0] for line in said] == ["train.steps", "seed", "mesh.p"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"\xff\xfe\x00", "input.toml: not valid TOML"),
        (b"[train\n", "input.toml: not valid TOML"),
        (b"a = 1\na = 2\n", "input.toml: not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(text, line, tmp_path):
    (said,) = problems(text=text, folder=tmp_path)
    assert line in said


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ValueError, match="name an input file that exists"):
            load(path, [])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--train.steps"], "--train.steps: no value; write --train.steps VALUE"),
        (["--train.steps", "--seed", "1"], "--train.steps: no value; write --train.steps VALUE"),
        (["--seed", "1", "input.toml"], "input.toml: not understood; write INPUT.toml --section"),
        (["--seed.low", "1", "--seed.low.er", "2"], "--seed.low.er: low is a value and holds no"),
    ],
)
def test_a_command_line_that_is_not_understood_is_refused(options, line):
    (said,) = problems(*options)
    assert said.startswith(line)


def test_options_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "input.toml"
    path.write_text('name = "from file"\n[train]\nsteps = 7\nwarmup = 3\n')
    options = ["--train.steps=9", "--train.learning_rate", "1e-4", "--parallel.scheme", "2.5d"]
    config = load(path, options)
    assert (config.name, config.train.warmup, config.train.steps) == ("from file", 3, 9)
    assert (config.train.learning_rate, config.parallel.scheme) == (1e-4, "2.5d")
    assert config.train.batch == Config().train.batch
    assert load(path, ["--data.path=a=b"]).data.path == "a=b"
    assert load(path, ["--train.warmup", "4"]).train.warmup == 4


def test_the_shipped_input_is_a_cube():
    config = settle(load(SHIPPED, []), 64)
    assert config.mesh.sizes() == {"p": 1, "d": 1, "c": 1, "e": 1, "x": 4, "y": 4, "z": 4}


@pytest.mark.parametrize("path", [None, SHIPPED], ids=["default", "shipped"])
def test_toml_round_trips(path):
    config = load(path, [])
    tree = tomllib.loads(to_toml(config))
    assert {f"{t}.{key}" for t, keys in tree.items() if isinstance(keys, dict) for key in keys} < {
        *known_keys()
    }
    assert write_and_load(config) == config


def write_and_load(config):
    """`config` by way of the text that a run saves."""
    from hpc3d.config import validate

    return validate(tomllib.loads(to_toml(config)))


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@settings(max_examples=100, deadline=None)
@given(text, text, st.integers(0, 2**63), st.floats(0, 1e300), st.booleans())
def test_toml_round_trips_with_any_values(name, path, seed, rate, tied):
    plain = Config()
    config = replace(
        plain,
        name=name,
        seed=seed,
        mesh=MeshConfig(x=2, order="p d c e z y x"),
        parallel=replace(plain.parallel, split={"m": "x", "n": "y"}),
        model=replace(plain.model, tied=tied, vocabulary=300),
        data=replace(plain.data, path=path),
        train=replace(plain.train, learning_rate=rate),
    )
    assert asdict(write_and_load(config)) == asdict(config)


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
