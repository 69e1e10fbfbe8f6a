"""The pages: links are valid, index.md lists all pages, and examples run.

Modules, functions and classes of hpc3d that pages and docstrings name exist.
"""

import ast
import builtins
import re
from functools import cache
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
DOTTED = re.compile(r"(?<![\w./-])hpc3d(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?(?!\w)")
CLASS = re.compile(r"`([A-Z][^\W_]*[a-z][^\W_]*)(?:`|\.[a-z]|\()")
# Files, and names of Slurm and of transformers.
FOREIGN = {"hpc3d.schema.json", "hpc3d.sif", "KillWait", "NodeName"}
FOREIGN |= {"AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoTokenizer"}
FOREIGN |= {"BertForMaskedLM", "BertForSequenceClassification"}
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if not re.match("[a-z]+:", link)]
    assert not [link for link in links if not (page.parent / link).exists()]
    paths = {*PATH.findall(text)} - WRITTEN
    assert not [path for path in paths if not (ROOT / path).exists()]


@cache
def anchors(page):
    """Return the anchors of the headings of a page, as created by GitHub and MyST."""
    headings = re.findall(r"^#+ (.+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_exist(page):
    links = re.findall(r"\]\(([^)\s:]*\.md)?#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    pages = [page.parent / name if name else page for name, _ in links]
    assert not [link for link, path in zip(links, pages) if link[1] not in anchors(path)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_documented_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    modules = {*re.findall(r"python -m hpc3d\.([a-z_.]+[a-z])", text)}
    places = [ROOT.joinpath("hpc3d", *name.split(".")) for name in modules]
    files = [(path.with_suffix(".py"), path / "__main__.py") for path in places]
    assert not [here for here in files if not any(path.exists() for path in here)]
    assert {*re.findall(r"\bhpc3d (\w+) gpt-", text)} <= {*COMMANDS}


@cache
def sources():
    """Return {dotted name of a module: its syntax tree}."""
    paths = {path.relative_to(ROOT): path for path in (ROOT / "hpc3d").rglob("*.py")}
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for name, path in paths.items()
    }


@cache
def identifiers(module):
    """Return the names that a module defines or uses."""
    fields = "name", "id", "attr", "arg", "asname"
    nodes = [*ast.walk(sources()[module])]
    found = {getattr(node, field, None) for node in nodes for field in fields}
    return {str(each).rpartition(".")[2] for each in found}


@cache
def all_identifiers():
    return {*dir(builtins)}.union(*map(identifiers, sources()))


def unknown(text):
    """Return the modules, functions and classes named in a text that do not exist."""
    wrong = [name for name in CLASS.findall(text) if name not in all_identifiers()]
    for name in DOTTED.findall(text):
        module, rest = name, set()
        while module not in sources():
            module, _, last = module.rpartition(".")
            rest.add(last)
        if not rest <= identifiers(module):
            wrong.append(name)
    return [name for name in wrong if name not in FOREIGN]


@pytest.mark.parametrize(
    "page", [each for each in PAGES if each.name != "CHANGELOG.md"], ids=name_of
)
def test_names_of_the_code_on_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    assert not unknown("".join(re.findall(r"`[^`\n]+`", text)))


def test_names_of_the_code_in_docstrings_exist():
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    texts = {
        f"{module} {getattr(node, 'name', '')}": ast.get_docstring(node) or ""
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    }
    assert not {place: unknown(text) for place, text in texts.items() if unknown(text)}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`hpc3d.tensor.split`, `hpc3d.tensor.split.Split`, `hpc3d.find_layouts`", []),
        ("`hpc3d.tensor.splits`", ["hpc3d.tensor.splits"]),
        ("hpc3d.tensor.split.Divide", ["hpc3d.tensor.split.Divide"]),
        ("`Split.next()`, `Content`", ["Content"]),
    ],
)
def test_a_name_that_does_not_exist_is_found(text, wrong):
    assert unknown(text) == wrong


QUOTED = re.compile(r"^\*\*.*?\*\*(?: or \*\*.*?\*\*)?", re.MULTILINE | re.DOTALL)
# Ends of the fixed phrases of a message: parts that it fills in, and punctuation.
GIVEN = re.compile(r"\S*\.\.\.\S*|\d+|hn\d|\b(?:input|machine|all|does|\w)\b|[,;:=(]")
# Messages of MPI, of the dynamic linker and of HDF5.
OTHERS = "libmpi", "prterun", "pmix", "there are not", "runtime env", "prte", "truncated file"
OTHERS += ("no module named",)


def phrases(message):
    """Return the fixed phrases of a message: sequences of up to three words."""
    for part in GIVEN.split(message):
        row = part.split()
        yield from (" ".join(row[n : n + 3]) for n in range(max(1, len(row) - 2)))


def test_messages_in_troubleshooting_are_printed():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`]+)`", " ".join(QUOTED.findall(text)))
    ours = [each for each in quoted if not each.lower().startswith(("mpirun", *OTHERS))]
    scripts = (ROOT / "hpc3d" / "jobs").glob("*.sh")
    paths = [*(ROOT / "hpc3d").rglob("*.py"), *scripts]
    # The parts of a string on several lines are joined.
    source = re.sub(r'"\s*f?"', "", " ".join(path.read_text(encoding="utf-8") for path in paths))
    assert len(ours) > 12
    assert not [each for each in ours if not all(one in source for one in phrases(each))]


def test_index_links_every_page():
    found = {*LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))}
    assert {path.name for path in PAGES if path.parent.name == "docs"} - {"index.md"} <= found


def test_api_examples_run():
    examples = EXAMPLE.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert len(examples) == 2
    for code in examples:
        exec(compile(code, "docs/api.md", "exec"), {})


def test_readme_has_at_most_150_lines():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150
