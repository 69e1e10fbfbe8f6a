"""Shell commands in the pages, split into words."""

import re
import shlex
from typing import NamedTuple

from tests.mpi import ROOT

STUBS = {"readme.md", "contributing.md", "jobs.md"}  # of make docs
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in STUBS
    ),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("jobs", "packaging", "notebooks", "tests")
        for path in (ROOT / folder).rglob("*.md")
    ),
]

# What a line of an indented block, or a span of a text, begins with if it is a command.
PROGRAMS = (
    *("python", "hpc3d", "mpirun", "mpiexec", "srun", "sbatch", "torchrun", "make", "pip"),
    *("apptainer", "docker", "spack", "rattler-build", "conda", "h5ls", "h5dump"),
    *("cat", "ls", "bash", "sleep", "kill", "source", "export", "for", "done"),
)
# hf, tensorboard and others that a text names are not of ours.
COMMAND = re.compile(rf"(?:\w+=\S+ +)*(?:\S*/)?(?:{'|'.join(PROGRAMS)})(?= |$)|\w+=\$\(")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHOWN_FILE = re.compile(r"`(\w+\.(?:py|toml))`:\n\n```\w+\n(.*?)```", re.DOTALL)
DETERMINISTIC = re.compile(r"hpc3d[. ](simulate|plan|layout)\b|--dry-run")
SHELLS = "sh", "bash", "console"
SPAN = re.compile(r"`([^`\n]+)`")
ALTERNATIVES = re.compile(r"(?<= )[a-z]+(?:\|[a-z]+)+(?= |$)")


class Documented(NamedTuple):
    """Command of a page: logical line `text` without its comment, which begins in `line`."""

    page: str
    line: int
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text}"


def files_on(page):
    """Return {name: text} of the files that a page shows after their names."""
    return dict(SHOWN_FILE.findall((ROOT / page).read_text(encoding="utf-8")))


def commands(page, text=None):
    """Return the lines with commands in the blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    found = []
    for first, lines in _blocks(text):
        found += _of_block(page, first, lines)
    return found


def excerpts(page):
    """Return (command, lines) for each block with output of a deterministic command, which is the
    last command above the block."""
    text, found = (ROOT / page).read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        above = commands(page, text[: fence.start()]) if fence[2] == "text" else []
        last = max(above, key=lambda each: each.line, default=None)
        if last and DETERMINISTIC.search(last.text):
            found.append((last.text, [line.rstrip() for line in fence[3].splitlines()]))
    return found


def _blocks(text):
    """Yield (number of the first line, lines) of each block with commands: shell blocks, and other
    blocks with lines that are commands."""
    fences = [*FENCE.finditer(text)]
    for fence in fences:
        lines = fence[3].split("\n")[:-1]
        first = text.count("\n", 0, fence.start()) + 2
        if fence[2] in SHELLS:
            yield first, [line.strip().removeprefix("$ ") for line in lines]
        elif not fence[2] and any(line.startswith("$ ") for line in lines):
            yield from ((first + n, [s[2:]]) for n, s in enumerate(lines) if s.startswith("$ "))
    blank = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for block in re.finditer(r"(?:^ {4,}\S.*\n)+", blank, re.MULTILINE):
        lines = [line[4:] for line in block[0].split("\n")[:-1]]
        if any(COMMAND.match(line) for line in lines):
            yield blank.count("\n", 0, block.start()) + 1, lines


def _of_block(page, first, lines):
    lines, place = [*lines], 0
    while place < len(lines):
        start, text = place, lines[place].strip()
        while text.endswith("\\"):
            place += 1
            text = f"{text[:-1].rstrip()} {lines[place].strip()}"
        place += 1
        for each in _alternatives(re.sub(r"(^|\s)#\s.*", "", text).rstrip()):
            yield Documented(page, first + start, each)


def _alternatives(text):
    """Return the commands that `show|verify RUN` abbreviates."""
    found = ALTERNATIVES.search(text)
    choices = found[0].split("|") if found else []
    return [text[: found.start()] + each + text[found.end() :] for each in choices] or [text]


def spans(page):
    """Return the commands with arguments in the text of a page."""
    lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
    found = [(number, span) for number, line in enumerate(lines, 1) for span in SPAN.findall(line)]
    return [
        Documented(page, number, each)
        for number, span in found
        if COMMAND.match(span) and " " in span
        for each in _alternatives(span.replace("\\|", "|"))
    ]


def simple(text):
    """Return the simple commands of a line, each a list of words, without environment settings and
    redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    found = [[]]
    for word in lexer:
        if word in ("<", ">"):
            next(lexer)
        elif word in ("&&", ";", "&", "|", "||"):
            found.append([])
        else:
            found[-1].append(word)
    return [words[_settings(words) :] for words in found if words[_settings(words) :]]


def _settings(words):
    return next((n for n, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
