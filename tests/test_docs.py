"""The pages: their links lead somewhere, index.md has them all, and their examples run."""

import re
from pathlib import Path

import pytest

from hpc3d.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
STUBS = {"readme.md", "contributing.md", "jobs.md"}  # of make docs
PAGES = [
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in STUBS),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "jobs/README.md")),
]
LINK = re.compile(r"\]\(([^)#\s]+)")
PATH = re.compile(r"`((?:hpc3d|tests|docs|inputs|jobs)/[\w./-]+\.\w+)`")
WRITTEN = {"inputs/machines/this-machine.toml"}  # by bench calibrate
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if not re.match("[a-z]+:", link)]
    assert not [link for link in links if not (page.parent / link).exists()]
    paths = {*PATH.findall(text)} - WRITTEN
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_there(page):
    text = page.read_text(encoding="utf-8")
    modules = {*re.findall(r"python -m hpc3d\.([a-z_.]+[a-z])", text)}
    places = [ROOT.joinpath("hpc3d", *name.split(".")) for name in modules]
    files = [(path.with_suffix(".py"), path / "__main__.py") for path in places]
    assert not [here for here in files if not any(path.exists() for path in here)]
    assert {*re.findall(r"\bhpc3d (\w+) gpt-", text)} <= {*COMMANDS}


def test_the_index_has_every_page():
    found = {*LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))}
    assert {path.name for path in PAGES if path.parent.name == "docs"} - {"index.md"} <= found


def test_the_examples_run():
    examples = EXAMPLE.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert len(examples) == 2
    for code in examples:
        exec(compile(code, "docs/api.md", "exec"), {})


def test_readme_is_one_screen_per_question():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150
