"""Every command in README and the pages is valid, and runs here or where a table says.

A new command of a page in EXECUTED runs unchanged. If it takes long, add a shorter form to
REDUCED. If it cannot run here, state in ELSEWHERE where it runs, or why it does not.
"""

import re
import shutil
from itertools import pairwise, starmap

import pytest

from hpc3d.runtime.metrics_file import read
from tests.documented import preparations
from tests.documented.pages import PAGES, commands, excerpts, simple, spans
from tests.documented.parsers import wrong
from tests.documented.scripts import output_of, reduced, script
from tests.documented.tables import ELSEWHERE, EXPECTED, REDUCED, SETTINGS, SHOWN
from tests.mpi import ROOT
from tests.strided import daily

SECONDS = 280  # of a page
RUNS = "python", "hpc3d", "mpirun", "ls", "for", "until", "do", "done", "sleep", "kill", "wait"


def named(page):
    """Return {"PAGE COMMAND": command} of a page."""
    return {f"{page} {each.text}": each for each in commands(page)}


def entry(table, name):
    """Return the first matching pattern of a table, or None."""
    return next((pattern for pattern in table if re.search(pattern, name)), None)


def here(page):
    """Return the commands of a page that are run here."""
    return {name: each for name, each in named(page).items() if not entry(ELSEWHERE, name)}


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_parses(page):
    whole = [(each, wrong(each.text)) for each in commands(page)]
    parts = [(each, wrong(each.text, whole=False)) for each in spans(page)]
    found = [f"{each}\n{said}" for each, said in whole + parts if said]
    assert not found, "\n".join(found)


def unclassified(name, each):
    """Return what to do about a command that this module cannot run unchanged."""
    where = "tests/documented/tables.py"
    unknown = [words for words in simple(each.text) if words[0] not in RUNS]
    if unknown and not each.text.startswith("RUN="):
        return (
            f"{each}: say in ELSEWHERE of {where} where it is run, or why it is not; "
            "what commands print stands in blocks of its own"
        )
    if re.search(r"(^|; )sleep ", each.text):
        return f"{each}: wait for what the next command needs, in an `until` loop, not for seconds"
    if re.search(r"hpc3d[. ]train\b(?!.*--dry-run)", name) and not entry(REDUCED, name):
        return f"{each}: say in REDUCED of {where} how it is made shorter, or in ELSEWHERE"
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_is_run_or_its_exception_is_listed(page):
    found = [*filter(None, starmap(unclassified, here(page).items()))]
    assert not found, "\n".join(found)


def test_exception_tables_have_no_stale_entries():
    """A pattern is stale if it matches no command, or only commands of earlier patterns."""
    names = [name for page in PAGES for name in named(page)]
    ours = [name for page in PAGES for name in here(page)]
    stale = {*ELSEWHERE} - {entry(ELSEWHERE, name) for name in names}
    stale |= {*REDUCED, *EXPECTED} - {
        entry(table, n) for table in (REDUCED, EXPECTED) for n in ours
    }
    assert not stale, "no command needs these lines of tests/documented/tables.py"


@pytest.mark.parametrize("page", SETTINGS)
def test_placeholder_settings_occur_in_the_commands(page):
    lines = " ".join(here(page))
    assert not [word for word in SETTINGS[page] if word not in lines]


EXECUTED = [page for page in PAGES if here(page)]


def test_preparations_belong_to_executed_pages():
    assert {*preparations.COMMANDS, *preparations.FILES} <= {*EXECUTED}


@pytest.mark.parametrize("page", preparations.FILES)
def test_prepared_files_occur_in_the_commands(page):
    words = " ".join(each.text for each in here(page).values())
    folders = {re.sub("/more.txt$", "/", name) for name in preparations.FILES[page]}
    assert not [name for name in folders if name.removesuffix(".py") not in words]


@pytest.mark.parametrize("page", SHOWN)
def test_expected_output_appears_on_the_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [each for each in SHOWN[page] if not re.search(each, text)]


def quoted():
    """Yield a test case for each excerpt; those of searches and techniques are slow."""
    for page in PAGES:
        for text, lines in excerpts(page):
            long = "hpc3d.plan" in text and "--schedule" not in text
            marks = [pytest.mark.slow] if long else []
            yield pytest.param(page, text, lines, marks=marks, id=f"{page}: {text}")


@pytest.mark.parametrize(("page", "text", "lines"), [*quoted()])
def test_excerpts_of_deterministic_commands_are_printed(page, text, lines, tmp_path):
    (tmp_path / "inputs").symlink_to(ROOT / "inputs")
    printed = output_of(script([(with_names(page, text), 0)]), tmp_path, SECONDS)
    known = {line.rstrip() for line in printed.splitlines()} | {"...", ""}
    assert not [line for line in lines if line not in known]


@pytest.fixture(scope="module")
def some_run(tmp_path_factory):
    """Folder of a small run, which pages call results/RUN."""
    folder = tmp_path_factory.mktemp("run")
    output_of(script([(preparations.TRAIN, 0)]), folder, 60)
    (run,) = (folder / "results").iterdir()
    return run


def with_names(page, text):
    """Return a command with a reader's own names."""
    for word, value in SETTINGS.get(page, {}).items():
        text = text.replace(word, value)
    return text


def as_typed(name, page, text):
    """Return a command with a reader's own names, in its shorter form."""
    text = with_names(page, text)
    pattern = entry(REDUCED, name)
    return reduced(text, REDUCED[pattern]) if pattern else text


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[daily] if page == "README.md" else []) for page in EXECUTED],
)
def test_commands_of_a_page_run(page, tmp_path, some_run):
    for name in ("inputs", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(some_run, tmp_path / "results" / "RUN")
    preparations.files_of(page, tmp_path)
    before = [(text, 0) for text in preparations.COMMANDS.get(page, [])]
    typed = [
        (as_typed(name, page, each.text), EXPECTED.get(entry(EXPECTED, name), 0))
        for name, each in here(page).items()
    ]
    printed = output_of(script(before + typed), tmp_path, SECONDS)
    print(printed)
    assert not [each for each in SHOWN.get(page, []) if not re.search(each, printed)]


@pytest.mark.slow
def test_first_tutorial_run_has_healthy_losses(tmp_path):
    """Tests losses and gradient norms of 16 steps on one rank, which equal those of four ranks."""
    (text,) = (each.text for each in commands("docs/tutorial.md") if "--name tour " in each.text)
    words = text.partition("hpc3d.train --launch 4 ")[2]
    short = "--train.steps 16 --train.decay_steps 40 --checkpoint.every 0"
    output_of(f"python -m hpc3d.train {words} {short}", tmp_path, SECONDS)
    (run,) = (tmp_path / "results").iterdir()
    steps = read(run)
    assert len(steps) == 16 and max(each["gradient_norm"] for each in steps) < 10
    assert all(later["loss"] < earlier["loss"] + 0.3 for earlier, later in pairwise(steps))
