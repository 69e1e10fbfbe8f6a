"""Input and machine files of the package: valid, found by name, and installed."""

import os
from configparser import ConfigParser
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import hpc3d
from hpc3d import train
from hpc3d.__main__ import main
from hpc3d.checkpoints.resume import run_to_resume
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.config.load import load
from hpc3d.config.package_data import INPUT, MACHINE, find, new_path, shipped, text_path
from hpc3d.config.resolve import resolve
from hpc3d.model import families
from hpc3d.model.families import family_of
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LayerRange, build
from hpc3d.predict.machine import machine_file
from hpc3d.tensor.split import Split
from tests.runs import plan_of

PACKAGE = Path(hpc3d.__file__).parent
ROOT = PACKAGE.parent
INPUTS = ROOT / "inputs"


def ranks(config):
    return prod(config.sizes().values())


@pytest.mark.parametrize("path", sorted(INPUTS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_input_is_valid_on_its_own_mesh(path):
    config = load(path, [])
    assert config.name == path.stem
    resolve(config, ranks(config))


# Parameters as the weights on their pages have them.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "gemma-2-2b": 2_614_341_888,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "switch-c": 1_571e9,  # arXiv:2101.03961, table 9
    "gshard-600b": 600e9,  # arXiv:2006.16668, table 3
}
ROUNDED = "switch-c", "gshard-600b"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameter_counts(name):
    config = load(name, [])
    assert config.name == name
    family, mesh = family_of(config.model), abstract_mesh({}, {})
    sizes, parameters = family.sizes(config.model, config.model.vocabulary), Parameters(mesh, "f4")
    whole = LayerRange(range(sizes.layers), first=True, last=True)
    splits = {"dense": Split(), "experts": Split()}
    build(mesh, parameters, ModelSpec(family, sizes, splits), [whole])
    total = sum(prod(item.shape) for item in parameters)
    assert total == families.parameters(config.model).total
    assert total == PUBLISHED[name] or name in ROUNDED
    assert total == pytest.approx(PUBLISHED[name], rel=0.01)


def test_every_shipped_model_has_a_published_parameter_count():
    assert {path.stem for path in (INPUTS / "models").glob("*.toml")} == {*PUBLISHED}


def test_pipeline_and_data_parallel_inputs_train_the_same_model():
    pair = [load(INPUTS / f"gpt-{name}.toml", []) for name in ("pp-vs-dp", "dp-vs-pp")]
    one, other = (replace(each, name="", mesh=None, parallel=None) for each in pair)
    assert one == other
    assert ranks(pair[0]) == ranks(pair[1])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(path, *parts):
    return path.samefile(INPUTS.joinpath(*parts))


@pytest.mark.parametrize("before", ["", "inputs/", "./inputs/"])
@pytest.mark.parametrize("after", ["", ".toml"])
def test_shipped_names_are_found_from_any_folder(before, after, elsewhere):
    assert same(find(f"{before}gpt-1.3b-8gpu{after}", INPUT), "gpt-1.3b-8gpu.toml")
    assert same(find(f"{before}h100{after}", MACHINE), "machines", "h100.toml")
    assert same(find(f"{before}machines/h100{after}", MACHINE), "machines", "h100.toml")


def test_inputs_and_machines_can_be_given_by_name(elsewhere):
    assert load("gpt-3d-64", []) == load(INPUTS / "gpt-3d-64.toml", [])
    assert machine_file.load("h100") == machine_file.load(INPUTS / "machines" / "h100.toml")


def test_existing_path_has_priority_over_a_shipped_name(elsewhere):
    for path in ("inputs/gpt-3d-64.toml", "gpt-3d-64.toml", "gpt-3d-64"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
        assert find("gpt-3d-64", INPUT) == Path(path)
    assert find("inputs/gpt-3d-64.toml", INPUT) == Path("inputs/gpt-3d-64.toml")


def test_folder_with_a_shipped_name_is_ignored(elsewhere):
    Path("gpt-3d-64").mkdir()
    assert same(find("gpt-3d-64", INPUT), "gpt-3d-64.toml")


@pytest.mark.parametrize(
    ("word", "kind", "begins"),
    [
        (
            "gpt-3d-46",
            INPUT,
            "gpt-3d-46: no such input; did you mean gpt-3d-64? Otherwise, specify a path, or ",
        ),
        (
            "inputs/gpt-4d.toml",
            INPUT,
            "inputs/gpt-4d.toml: no such input; did you mean gpt-4d-64? Otherwise, ",
        ),
        (
            "machines/H100",
            MACHINE,
            "machines/H100: no such machine; did you mean h100? Otherwise, ",
        ),
        ("mine/x.toml", MACHINE, "mine/x.toml: no such machine; specify an existing path"),
        ("none.toml", INPUT, "none.toml: no such input; specify an existing path"),
        ("results/run", INPUT, "results/run: no such input; specify an existing path"),
        ("h100", INPUT, "h100: no such input; specify a path, or one of bert-64, "),
        ("gpt-serial", MACHINE, "gpt-serial: no such machine; specify a path, or one of a1"),
        (
            ".",
            MACHINE,
            ".: is a folder; specify a path, or one of a100-selene, a100-vtrain, h100, ",
        ),
        ("", INPUT, "'': no such input; specify a path, or one of bert-64, "),
        ("\0", INPUT, "\0: no such input; specify a path, or one of bert-64, "),
        ("x" * 5000, INPUT, "x" * 5000 + ": no such input; specify a path, or one of "),
        ("../inputs/gpt-3d-64", MACHINE, "../inputs/gpt-3d-64: no such machine; specify"),
    ],
)
def test_unknown_name_is_rejected_with_its_kind_and_the_known_names(word, kind, begins, elsewhere):
    with pytest.raises(ValueError) as refused:
        find(word, kind)
    assert str(refused.value).startswith(begins)
    assert "\n" not in str(refused.value)


def test_folder_of_a_run_is_rejected_with_its_configuration(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(
        ValueError, match=f"^{tmp_path}: is the folder of a run; use .*/config.toml$"
    ):
        find(str(tmp_path), INPUT)


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_commands_show_how_to_import_a_hugging_face_model(name, elsewhere, capsys):
    for each in ("config.json", "model.safetensors"):
        (elsewhere / each).write_text("{}", encoding="utf-8")
    given = elsewhere / name
    source = given if given.suffix == ".safetensors" else elsewhere
    line = (
        f"{given}: a model of Hugging Face Transformers, not a run or an input file; run python "
        f"-m hpc3d.checkpoint import {source} -o results/NEW, then use results/NEW (train: "
        "--resume results/NEW)"
    )
    for words in (["layout"], ["plan", "--ranks", "2"], ["simulate"]):
        assert main([*words, str(given)]) == 2
        assert capsys.readouterr().err.endswith(f"{line}\n")
    for reading in (lambda: load(given, []), lambda: run_to_resume(["--resume", str(given)])):
        with pytest.raises(ValueError) as refused:
            reading()
        assert str(refused.value) == line


@pytest.mark.parametrize("word", ["inputs/corpus", "./inputs/corpus", "corpus", "inputs/corpus/"])
def test_corpus_is_found_from_any_folder(word, elsewhere):
    assert same(text_path(word), "corpus")
    assert same(text_path(f"{word}/python.txt"), "corpus", "python.txt")
    Path("inputs/corpus").mkdir(parents=True)
    Path("corpus").mkdir()
    assert text_path(word) == word


@pytest.mark.parametrize(
    "word", ["nowhere", "inputs/nowhere", "inputs/../train.py", "../config.py", "\0", "x" * 5000]
)
def test_unknown_text_path_is_unchanged(word, elsewhere):
    assert text_path(word) == word


def test_training_finds_the_default_text_from_an_empty_folder(elsewhere):
    words = ["--run.out", str(elsewhere / "out")]
    assert train.read_command_line(1, words).config.data.path == "inputs/corpus"
    # a run that is resumed in another folder finds the text there
    assert plan_of(words).config.data.path == "inputs/corpus"


def test_generated_machine_file_is_found_by_name(elsewhere):
    for folder in ("", "inputs/machines"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = new_path("this-machine", MACHINE)
        assert path == Path(folder, "this-machine.toml")
        path.touch()
        assert find("this-machine", MACHINE) == path
        path.unlink()


# What setup.cfg puts into sdist and wheel.


def described():
    """Return {package folder: patterns} of setup.cfg, and the files that it omits."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    sections = "options.package_data", "options.exclude_package_data"
    return [
        {ROOT / name.replace(".", "/"): globs.split() for name, globs in setup[section].items()}
        for section in sections
    ]


def matched(patterns):
    return {
        path
        for folder, globs in patterns.items()
        for glob in globs
        for path in folder.glob(glob)
        if path.is_file()
    }


def test_every_data_file_is_in_the_package():
    walk = [(Path(here), names) for here, _, names in os.walk(PACKAGE, followlinks=True)]
    files = {here / name for here, names in walk if here.name != "__pycache__" for name in names}
    ours = {path for path in files if path.suffix != ".py" or shipped() in path.parents}
    data, left_out = map(matched, described())
    assert data == ours
    kinds = {path.relative_to(PACKAGE).parts[:2] for path in data}
    assert kinds > {("analyze", "report"), ("cuda", "kernels"), ("share", "machines")}
    assert {path.name for path in left_out} <= {"this-machine.toml"}


def test_package_contains_all_inputs():
    every = {path.relative_to(INPUTS) for path in INPUTS.rglob("*") if path.is_file()}
    files = {path for path in every if path.suffix != ".pyc"}
    assert files == {
        path.relative_to(shipped())
        for path in matched(described()[0])
        if shipped() in path.parents
    }
    assert len(files) > 20
