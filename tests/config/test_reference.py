"""The description of each key in `train --help`."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import jsonschema
import pytest
from jsonschema import Draft202012Validator, ValidationError

from hpc3d.config.input_file import Config
from hpc3d.config.load import flat, known_keys, literal, load, validate
from hpc3d.config.reference import about, manual, meanings, page, schema
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.train import explain

ROOT = Path(__file__).parents[2]
TYPES = get_type_hints(Config)
TABLES = {name: kind for name, kind in TYPES.items() if is_dataclass(kind)}


def entries():
    """Return {key with its section: its lines} of the manual."""
    found, section = {}, ""
    for line in manual().splitlines():
        left, _, _ = line.removeprefix("# ").partition("#")
        if line.startswith("["):
            section = line[1 : line.index("]")] + "."
        elif "=" in left:
            found[section + left.partition("=")[0].strip()] = [line]
        elif line.startswith(" ") and found:
            [*found.values()][-1].append(line)
    return found


def test_help_option_prints_the_manual(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "99")
    explain(["--help"])
    assert manual() in capsys.readouterr().out


def test_configuration_page_is_up_to_date():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == page(), "run: python -m hpc3d.config.reference > docs/configuration.md"


def test_manual_lists_every_key_once():
    assert [*entries()] == [*flat(Config())]
    assert {*entries()} | {*TABLES} == {*known_keys()}


@pytest.mark.parametrize("table", [Config, *TABLES.values()], ids=lambda table: table.__name__)
def test_every_key_has_its_own_description(table):
    keys = [item.name for item in fields(table) if item.name not in TABLES]
    texts = meanings(table)
    assert [*texts] == keys
    assert len({*texts.values()}) == len(keys)
    assert all(len(text.split()) > 1 and "  " not in text for text in texts.values())


def test_manual_is_a_valid_input_file_with_the_defaults():
    defaults = tomllib.loads(manual())
    assert validate(defaults) == load(None, [])
    jsonschema.validate(defaults, SCHEMA)


def test_absent_keys_are_comments_that_explain_their_default():
    for key, lines in entries().items():
        absent = flat(Config())[key] is None
        assert lines[0].startswith("# ") == absent
        assert ("Default: " in " ".join(" ".join(lines).split())) == absent


def test_manual_lists_every_choice():
    found, seen = entries(), 0
    for name, table in TABLES.items():
        for key, kind in get_type_hints(table).items():
            text = " ".join(found[f"{name}.{key}"])
            choices = [word for word in get_args(kind) if isinstance(word, (str, int))]
            assert all(literal(choice) in text for choice in choices)
            seen += len(choices)
    assert seen > 25
    text = meanings(TYPES["parallel"])["schedule"].replace(",", "").replace("(", "").split()
    assert {*SCHEDULES} <= {*text}


def test_manual_lines_fit_99_columns():
    assert max(map(len, manual().splitlines())) <= 99


@pytest.mark.parametrize(("columns", "width"), [("70", 70), ("1", 60), ("500", 99)])
def test_help_fits_the_terminal_width(columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    explain(["--help", "train"])
    lines = capsys.readouterr().out.splitlines()
    assert width - 12 < max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train.warmup", "train.warmup = 2"),
        ("mesh", "[mesh]"),
        ("seed", "seed = 1234"),
        ("parallel.schedule", "# parallel.schedule ="),
        ("parallel.attention", '# parallel.attention =      # "full" | "chunked"; '),
    ],
)
def test_help_can_show_a_single_key_or_section(name, said):
    text = about(name)
    assert text.startswith(said)
    assert "# Number of steps of the linear learning-rate warmup" in about("train.warmup")
    assert ("\np = 1 " in about("mesh")) and "[parallel]" not in about("mesh")


@pytest.mark.parametrize("name", ["train.stepz", "meshes", "seed.x", "train."])
def test_help_for_an_unknown_key_is_rejected(name):
    with pytest.raises(ValueError, match=f"^--help {re.escape(name)}: no such key or section; "):
        about(name)


@pytest.mark.parametrize(
    ("name", "said"), [("lr", "use train.learning_rate"), ("steps", "train.steps")]
)
def test_help_for_a_familiar_name_suggests_our_key(name, said):
    with pytest.raises(ValueError, match=said):
        about(name)


# The JSON schema

INPUTS = ROOT / "inputs"
SCHEMA = json.loads((INPUTS / "hpc3d.schema.json").read_text())
FILES = sorted([*INPUTS.glob("*.toml"), *INPUTS.glob("models/*.toml")])


def test_schema_is_up_to_date():
    assert schema() == SCHEMA
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_inputs_reference_the_schema_and_conform_to_it(path):
    text = path.read_text()
    named = re.match(r"#:schema (.*)\n", text)
    assert (path.parent / named[1]).resolve() == INPUTS / "hpc3d.schema.json"
    jsonschema.validate(tomllib.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        "[train]\nlr = 1",
        "[train]\nsteps = 0",
        "[train]\nsteps = 2147483648",
        '[train]\nsteps = "20"',
        '[parallel]\nscheme = "4d"',
        "[meshes]\nx = 1",
        "[mesh]\nx = 0",
        "seed = -1",
        "[model]\ndropout = 1.0",
        "[model]\nnorm_epsilon = -1e-5",
        "[train]\nlearning_rate = -1.0",
    ],
)
def test_schema_rejects_invalid_inputs(wrong):
    with pytest.raises(ValidationError):
        jsonschema.validate(tomllib.loads(wrong), SCHEMA)


def test_schema_describes_every_key():
    for kind in [SCHEMA, *SCHEMA["$defs"].values()]:
        plain = [each for each in kind["properties"].values() if "$ref" not in each]
        assert plain and all(each["description"] for each in plain)
    assert SCHEMA["$defs"]["TrainConfig"]["properties"]["steps"]["maximum"] == 2**31 - 1
