"""Escape untrusted text from files, arguments and the environment before it is printed.

Such text may contain control characters, line breaks, or invalid bytes.  `sanitized` escapes all
of them, so that one line stays one visible line.  Inside `sanitized_streams`, everything that a
command prints is escaped, except line breaks.  The escapes, such as \\u001b, are valid in JSON and
TOML strings.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

_MEMORY = (
    "out of memory ({}): reduce the model, batch or input, or use a machine with more memory "
    "(python -m hpc3d.plan finds layouts that fit)"
)
_LONGEST_LINE = 1000  # characters
_NO_READER = (errno.EPIPE, errno.EIO)  # errno of a write to a closed pipe or terminal
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


class OutputError(OSError):
    """Exception for a failed write to standard output, for example to a file on a full disk."""


class Problems(ValueError):
    """Exception that reports several errors, with one line of text per error."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = [*map(sanitized, lines)]
        super().__init__("\n".join(self.lines))


def sanitized(text: str) -> str:
    """Return a text as one line of printable characters.

    All characters that Python considers unprintable are escaped: control characters,
    bidirectional formatting characters, line separators, spaces except U+0020, and surrogates
    (invalid UTF-8 bytes).
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else escape(letter) for letter in text)


def escape(letter: str) -> str:
    code = ord(letter)
    return _SHORT.get(letter) or (f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")


def sanitized_lines(text: str) -> str:
    """Sanitize each line of a text."""
    return "\n".join(map(sanitized, text.split("\n")))


def sanitized_tree(tree: Any) -> Any:
    """Sanitize all strings in nested dicts, lists and tuples."""
    match tree:
        case str():
            return sanitized(tree)
        case dict():
            return {sanitized_tree(key): sanitized_tree(value) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(map(sanitized_tree, tree))
    return tree


def lines_of(error: BaseException) -> list[str]:
    """Return the message of an exception as a list of lines, one line per problem."""
    if isinstance(error, Problems):
        return [*map(_shortened, error.lines)]
    if isinstance(error, OSError):
        return [sanitized(file_and_reason(error))]
    if isinstance(error, MemoryError):
        return [sanitized(_MEMORY.format(error))]
    return [_shortened(sanitized(str(error) or type(error).__name__))]


def all_results(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions without arguments and return their results.

    If any of them raise ValueError, raise `Problems` with the errors of all functions.
    """
    results, problems = [], []
    for function in functions:
        try:
            results.append(function())
        except ValueError as error:
            problems += lines_of(error)
    if problems:
        raise Problems(problems)
    return results


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST_LINE:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} ... {line[-half:]}"


def file_and_reason(error: OSError) -> str:
    """Format an OSError as "FILE: REASON", or as the reason if the file name is unknown."""
    return f"{error.filename!s:.200}: {reason_of(error)}" if error.filename else reason_of(error)


def abbreviated(text: str, most: int = 100) -> str:
    """Shorten a text to `most` characters; three dots replace the rest."""
    return text if len(text) <= most else f"{text[:most]} ..."


def reason_of(error: OSError) -> str:
    """Return the system's error message for an OSError, or else the exception's text."""
    return error.strerror or str(error).rstrip(".")


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, as in 1 rank, 1,024 ranks or 2 batches."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def as_written(value: Any) -> str:
    """Format a value of a JSON or TOML file for a message: null, true and false as in the file."""
    if isinstance(value, str):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def nearest_values(values: Sequence[int], number: int) -> str:
    """Format the values next to a number in an ascending sequence without it, as in 4 or 8."""
    index = bisect(values, number)
    return " or ".join(map(str, values[max(index - 1, 0) : index + 1]))


class Controls(str):
    """Control sequences printed by hpc3d itself, which `SanitizedStream` does not escape."""

    __slots__ = ()


class SanitizedStream:
    """Text stream that escapes control characters and characters that it cannot encode.

    The strings "\\r" and "\\t" and all `Controls` strings are written unchanged.  If the reader
    has closed the stream, `unread` is set, and all further output is discarded.  After another
    write error, a `needed` stream raises OutputError, and any other stream discards all further
    output.
    """

    def __init__(self, stream: TextIO, needed: bool = True) -> None:
        self.stream, self.needed, self.unread = stream, needed, False

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        encoding = self.stream.encoding or "utf-8"
        ours = text in ("\r", "\t") or isinstance(text, Controls)
        visible = text if ours else sanitized_lines(text)
        with self._writing():
            self.stream.write(visible.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._writing():
            self.stream.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Discard this and all later output if the reader has closed the stream."""
        try:
            yield
        except OSError as error:
            if self.needed and error.errno not in _NO_READER:
                reason = os.strerror(error.errno) if error.errno else str(error)
                text = f"cannot be written ({reason})"
                raise OutputError(error.errno, text, "standard output") from None
            self.unread = True
            _discard(self.stream)


def _discard(stream: TextIO) -> None:
    """Connect a stream, including its buffered output, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def sanitized_streams() -> Iterator[None]:
    """Replace standard output and error with `SanitizedStream`s, which tolerate a closed pipe.

    When the context manager exits, buffered output that cannot be written is discarded, because
    Python would otherwise print an error message when the process exits.
    """
    _open_missing_streams()
    out, error = SanitizedStream(sys.stdout), SanitizedStream(sys.stderr, needed=False)
    with redirect_stdout(out), redirect_stderr(error):
        try:
            yield
        finally:
            out.needed = False
            out.flush()


def _open_missing_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process has closed.

    Otherwise, the next opened file would get the descriptor 0, 1 or 2 and receive printed text.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))
