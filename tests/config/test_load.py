"""Settings from a file and a command line, and their conversion back to text."""

import re
import tomllib
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.config.input_file import Config, MeshConfig
from hpc3d.config.load import known_keys, load, to_toml
from tests.config.refused import problems
from tests.config.test_input_file import SHIPPED
from tests.elided import elided


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("train.stepz", "train.stepz: ... train.steps?"),
        ("steps", "steps: ... train.steps?"),
        ("run.name", "run.name: ... name?"),
        ("modell", "modell: ... model?"),
        ("run.qqq", "run.qqq: ... out, label, signal, ..."),
    ],
)
def test_unknown_key_error_suggests_the_full_name(option, line):
    (said,) = problems(f"--{option}", "1")
    assert re.fullmatch(elided(line), said)


@pytest.mark.parametrize("option", ["mesh.q", "mesh.xx"])
def test_number_of_ranks_is_not_checked_if_a_mesh_key_is_unknown(option):
    serial = "--mesh.x", "1", "--mesh.y", "1", "--mesh.z", "1"
    (said,) = problems(*serial, f"--{option}", "8")
    assert said.startswith(f"{option}: unknown key; ")


def test_all_errors_are_reported_together(tmp_path):
    text = "stepz = 1\n[train]\nsteps = 'a'\nbatch = 1.5\n[modell]\n[mesh]\nq = 2\n"
    said = problems(text=text, folder=tmp_path)
    assert sorted(line.split(":")[0] for line in said) == [
        "mesh.q",
        "modell",
        "stepz",
        "train.batch",
        "train.steps",
    ]
    said = problems("--seed", "-1", "--train.steps", "0", "--torch.factory", "m:f")
    assert [line.split(" = ")[0] for line in said] == ["seed", "train.steps", "torch.factory"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"\xff\xfe\x00", "input.toml: ... TOML"),
        (b"[train\n", "input.toml: ... TOML"),
        (b"a = 1\na = 2\n", "input.toml: ... TOML"),
    ],
)
def test_invalid_toml_is_rejected(text, line, tmp_path):
    (said,) = problems(text=text, folder=tmp_path)
    assert re.search(elided(line), said)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95, "run = 3\n"])
def test_an_empty_or_truncated_file_of_a_run_is_refused(kept, tmp_path):
    """As an input file, it would give the defaults, which are not the settings of the run."""
    text = to_toml(Config())
    cut = text.rfind("\n", 0, int(kept * len(text))) + 1 if isinstance(kept, float) else 0
    path = tmp_path / "config.toml"
    path.write_text(text[:cut] or (kept if isinstance(kept, str) else ""))
    with pytest.raises(ValueError) as refused:
        load(path, [], of_run=True)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{path}: empty or truncated, run.watchdog_s is missing; restore it")
    path.write_text(text)
    assert load(path, [], of_run=True) == Config()


def test_paths_expand_home_and_environment_variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = load(None, ["--run.out", "~/results", "--data.path", "${SCRATCH}/text.txt"])
    assert (config.run.out, config.data.path) == ("/home/me/results", "/scratch/text.txt")
    resumed = load(None, ["--run.out", "$SCRATCH/a", "--data.path", "~/b"], of_run=True)
    assert (resumed.run.out, resumed.data.path) == ("/scratch/a", "/home/me/b")
    mixture = load(None, ["--data.path", '["$SCRATCH/a", "~/b"]'])
    assert mixture.data.path == ("/scratch/a", "/home/me/b")
    with pytest.raises(ValueError, match=r"unknown user; "):
        load(None, ["--run.out", "~nobody-here/a"])
    monkeypatch.delenv("SCRATCH")
    line = r"^run.out = \$SCRATCH/a: .* variable SCRATCH$"
    with pytest.raises(ValueError, match=line):
        load(None, ["--run.out", "$SCRATCH/a"])


def test_python_file_is_rejected_with_the_page_about_nanogpt(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("n_layer = 4  # nanoGPT\n")
    with pytest.raises(ValueError, match=r"config\.py: .* in TOML, .* docs/data\.md .* nanoGPT"):
        load(path, [])


def test_machine_file_is_rejected(tmp_path):
    (path := tmp_path / "m.toml").write_text('like = "h100"\n')
    with pytest.raises(ValueError, match=r"m\.toml: a machine file, not an input file; .*e$"):
        load(path, [])


def test_single_name_is_a_list_of_one(tmp_path):
    (path := tmp_path / "a.toml").write_text('[parallel]\noffload = "optimizer"\n')
    parallel = load(path, ["--parallel.recompute", "layernorm"]).parallel
    assert (parallel.offload, parallel.recompute) == (("optimizer",), ("layernorm",))
    assert load(path, ["--parallel.recompute", "full"]).parallel.recompute == "full"


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ('["layernorm", 1]', ": list either indices or names, not both; ... 'core_attn', ..."),
        ('["layernorm", "norm"]', "[1]: input should be ... 'layernorm', ... not 'norm'; ..."),
        (
            "attention",
            ": input should be 'none', ... 'core_attn', ... 'mlp', not 'attention'; ...",
        ),
        ("[[1]]", "[0]: input should be ... 'layernorm', ... not [1]; ..."),
    ],
)
def test_wrong_list_is_rejected_with_its_valid_entries(value, line):
    (said,) = problems("--parallel.recompute", value, ranks=1)
    assert re.fullmatch(elided(f"parallel.recompute{line}"), said)


def test_missing_file_is_rejected(tmp_path):
    lines = {tmp_path / "missing.toml": "no such input; specify an existing path"}
    lines[tmp_path] = "is a folder; specify a file"
    for path, line in lines.items():
        with pytest.raises(ValueError, match=f"^{path}: {line}$"):
            load(path, [])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--train.steps"], "--train.steps: ... --train.steps VALUE"),
        (["--train.steps", "--seed", "1"], "--train.steps: ... --train.steps VALUE"),
        (["--nothing"], "--nothing: unknown option; use one of name, seed, ..."),
        (["--sed"], "--sed: unknown option; did you mean seed?"),
        (["--seed"], "--seed: ... --seed VALUE"),
        (["--seed", "1", "input.toml"], "input.toml: ... INPUT.toml --section.key VALUE"),
        (["--seed.low", "1", "--seed.low.er", "2"], "--seed.low.er: low"),
        (
            ["--data.path", "[a.txt, b.txt]"],
            '--data.path [a.txt, b.txt]: not a list; in a shell, ... --data.path \'["one", ',
        ),
        (
            ["--parallel.layers_per_stage", "[1,a]"],
            "parallel.layers_per_stage: ... not '[1,a]'; in a shell, ... --parallel... '[1, 1]'",
        ),
        (
            ["--parallel.layers_per_stage", "1,1"],
            "parallel.layers_per_stage: ...; write a list, as in --parallel... '[1, 1]'",
        ),
        (
            ["--parallel.offload", "disk"],
            "parallel.offload: ...; write a list, as in --parallel.offload '[\"optimizer\"]'",
        ),
        (["--data.path", '["a", 3, 4]'], "data.path[1]: input should be a valid string, not 3; "),
    ],
)
def test_invalid_command_line_is_rejected(options, line):
    (said,) = problems(*options)
    assert re.match(elided(line), said)


def test_options_override_the_file_and_the_file_overrides_defaults(tmp_path):
    path = tmp_path / "input.toml"
    path.write_text('name = "from file"\n[train]\nsteps = 7\nwarmup = 3\n')
    options = ["--train.steps=9", "--train.learning_rate", "1e-4", "--parallel.scheme", "2.5d"]
    config = load(path, options)
    assert (config.name, config.train.warmup, config.train.steps) == ("from file", 3, 9)
    assert (config.train.learning_rate, config.parallel.scheme) == (1e-4, "2.5d")
    assert config.train.batch == Config().train.batch
    assert load(path, ["--data.path=a=b"]).data.path == "a=b"
    assert load(path, ["--train.warmup", "4"]).train.warmup == 4
    assert load(path).train.steps == 7 and load() == Config()


@pytest.mark.parametrize("path", [None, SHIPPED], ids=["default", "shipped"])
def test_toml_round_trips(path):
    config = load(path, [])
    tree = tomllib.loads(to_toml(config))
    assert {f"{t}.{key}" for t, keys in tree.items() if isinstance(keys, dict) for key in keys} < {
        *known_keys()
    }
    assert write_and_load(config) == config


def write_and_load(config):
    """Convert `config` to the text that a run saves, and load this text."""
    from hpc3d.config.load import validate

    return validate(tomllib.loads(to_toml(config)))


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


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
