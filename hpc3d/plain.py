"""Text of others, made plain: of files, arguments and the environment.

Such text may hold what a terminal obeys or hides, an end of a line, or bytes that are no letters.
`plain` shows all of these as escapes, so that one line stays one line and looks like what it is;
the streams of a command, `plain_streams`, do so with all that is printed, but for ends of lines.
The escapes, \\u001b, are those of JSON and TOML, in whose strings they may stand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

_MEMORY = (
    "out of memory ({}): give less, or a machine with more memory (python -m hpc3d.plan finds "
    "what fits)"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class Problems(ValueError):
    """Several things that are wrong, a line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = [*map(plain, lines)]
        super().__init__("\n".join(self.lines))


def plain(text: str) -> str:
    """A text as one line of letters that can be seen.

    What Unicode calls not printable is escaped: controls, marks of direction, separators of lines,
    spaces but the common one, surrogates (bytes that were no UTF-8).
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else escape(letter) for letter in text)


def escape(letter: str) -> str:
    code = ord(letter)
    return _SHORT.get(letter) or (f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")


def plain_lines(text: str) -> str:
    """The same of each line of a text of several."""
    return "\n".join(map(plain, text.split("\n")))


def plain_in(tree: Any) -> Any:
    """The same of each text in dicts, lists and tuples."""
    match tree:
        case str():
            return plain(tree)
        case dict():
            return {plain_in(key): plain_in(value) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(map(plain_in, tree))
    return tree


def lines_of(error: BaseException) -> list[str]:
    """What an error says, a line for each problem."""
    if isinstance(error, Problems):
        return error.lines
    if isinstance(error, OSError):
        return [plain(told(error))]
    if isinstance(error, MemoryError):
        return [plain(_MEMORY.format(error))]
    return [plain(str(error) or type(error).__name__)]


def told(error: OSError) -> str:
    """An OSError in words: its file, if it names one, and why."""
    return f"{error.filename!s:.200}: {why(error)}" if error.filename else why(error)


def why(error: OSError) -> str:
    """The reason of an OSError: the system's words, or those that it was raised with."""
    return error.strerror or str(error).rstrip(".")


def counted(number: int, noun: str) -> str:
    """A number of things, in words: 1 rank, 1,024 ranks, 2 batches."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


class Controls(str):
    """A text that has what a terminal is to obey: our own, around text that is plain."""

    __slots__ = ()


class Plain:
    """A text stream that escapes what is written to it, and what it has no letters for.  A write
    of "\\r" alone ends a line that the next one replaces, one of "\\t" alone is a tab, and one of
    Controls stays as it is."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        encoding = self.stream.encoding or "utf-8"
        ours = text in ("\r", "\t") or isinstance(text, Controls)
        visible = text if ours else plain_lines(text)
        self.stream.write(visible.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Standard output and error as `Plain` streams."""
    with redirect_stdout(Plain(sys.stdout)), redirect_stderr(Plain(sys.stderr)):
        yield
