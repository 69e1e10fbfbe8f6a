"""Text of others, made plain: of files, arguments and the environment.

Such text may hold what a terminal obeys or hides, an end of a line, or bytes that are no letters.
`plain` shows all of these as escapes, so that one line stays one line and looks like what it is;
the streams of a command, `plain_streams`, do so with all that is printed, but for ends of lines.
The escapes, \\u001b, are those of JSON and TOML, in whose strings they may stand.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

_MEMORY = (
    "out of memory ({}): give less, or a machine with more memory (python -m hpc3d.plan finds "
    "what fits)"
)
_LONGEST_LINE = 1000  # characters
_NO_READER = (errno.EPIPE, errno.EIO)  # of a closed pipe, of a terminal that is gone
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
        return [*map(_shortened, error.lines)]
    if isinstance(error, OSError):
        return [plain(told(error))]
    if isinstance(error, MemoryError):
        return [plain(_MEMORY.format(error))]
    return [_shortened(plain(str(error) or type(error).__name__))]


def _shortened(line: str) -> str:
    """A line without the middle of a long text that it quotes from a file."""
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} ... {line[-half:]}"


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
    Controls stays as it is.  Output that cannot be written because its reader is gone (`unread`)
    is discarded; so is any that cannot be written if the stream is not `needed`."""

    def __init__(self, stream: TextIO, needed: bool = True) -> None:
        self.stream, self.needed, self.unread = stream, needed, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        encoding = self.stream.encoding or "utf-8"
        ours = text in ("\r", "\t") or isinstance(text, Controls)
        visible = text if ours else plain_lines(text)
        with self._writing():
            self.stream.write(visible.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._writing():
            self.stream.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Discard this output and all that follows if the reader is gone."""
        try:
            yield
        except OSError as error:
            if self.needed and error.errno not in _NO_READER:
                raise
            self.unread = True
            _discard(self.stream)


def _discard(stream: TextIO) -> None:
    """Connect a stream to the null device, also for the output that it still holds."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Use `Plain` streams as standard output and error, which need no reader.

    At the end, output that cannot be written is discarded.  Otherwise Python would complain about
    it when it exits.
    """
    _open_missing_streams()
    out, error = Plain(sys.stdout), Plain(sys.stderr, needed=False)
    with redirect_stdout(out), redirect_stderr(error):
        try:
            yield
        finally:
            out.needed = False
            out.flush()


def _open_missing_streams() -> None:
    """Connect standard streams that were closed when this process started to the null device.

    They take the lowest file descriptors, so that no other file takes those of the streams.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))
