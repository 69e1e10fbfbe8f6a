"""Read small untrusted files with a size limit, and write files atomically.

The size is limited because reading from a device or a pipe may never reach end-of-file, and
because a large file is slow to parse.

A file is written as NAME.HOST.PID.tmp, and renamed to NAME when it is complete and on disk.  If a
process is killed, its temporary file remains until the next writer of NAME removes it.
"""

from __future__ import annotations

import glob
import io
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpc3d.console.sanitize import file_and_reason

_MOST_TEXT = 2**20  # maximum size in bytes of an input or machine file
MOST_JSON = 2**25  # maximum size in bytes of a config.json or a weight index
MOST_SCHEDULE = 2**24  # maximum size in bytes of a schedule's CSV file
_ABANDONED_S = 86400  # age in s after which another host's temporary file counts as abandoned
MOST_PARTS = 100  # maximum number of components in a dotted key; parsing takes quadratic time


def read(path: Path | str, most: int = _MOST_TEXT, remedy: str = "name a file") -> bytes:
    """Return the content of a regular file as bytes.

    Raises ValueError with a one-line message if the path is not a regular file, cannot be read or
    exceeds `most` bytes.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise ValueError(f"{path} is {kind}, but must be a regular file; {remedy}")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{file_and_reason(error)}; {remedy}") from None
    if len(content) > most:
        raise ValueError(f"{path}: larger than the limit of {most} bytes; {remedy}")
    return content


def toml(text: str) -> dict[str, Any]:
    """Parse TOML into nested dicts; raise ValueError if it is invalid or too large."""
    import tomllib  # imported here, because training ranks do not need it

    if len(text) > _MOST_TEXT:
        raise ValueError(
            f"the text has {len(text)} characters, more than the limit of {_MOST_TEXT}"
        )
    if any(part.count(".") > MOST_PARTS for part in re.split("[=,\n]", text)):
        raise ValueError(f"a dotted key has more than {MOST_PARTS} components")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("tables or arrays are nested too deeply") from None


@contextmanager
def replacing(path: Path, crowded: bool = False) -> Iterator[Path]:
    """Yield a temporary path; if the block succeeds, sync the file and rename it to `path`.

    If `path` is a device or a pipe, such as /dev/null, yield `path` itself, because it must not be
    replaced.  Set `crowded` if every rank writes to the folder.  The folder is then not searched
    for temporary files of killed processes.  An OSError names `path` or its missing folder, not
    the temporary path.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with naming(path):
            yield path
        return
    temporary = _temporary_name(path) if crowded else temporary_of(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except OSError as error:
        if str(error.filename) == str(temporary):
            error.filename = str(path if path.parent.is_dir() else path.parent)
        raise
    finally:
        with suppress(OSError):  # the disk may have become read-only
            temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its missing parents; remove the created folders if the block fails."""
    made: list[Path] = []
    try:
        for path in reversed([folder, *takewhile(lambda path: not path.exists(), folder.parents)]):
            path.mkdir()
            made.append(path)
        yield
    except BaseException:
        if made:
            shutil.rmtree(made[0], ignore_errors=True)
        raise


def temporary_of(path: Path) -> Path:
    """Return a temporary path for `path`; remove temporary files left by killed processes."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        host, _, process = left.name[len(path.name) + 1 : -len(".tmp")].rpartition(".")
        with suppress(OSError):  # another process removed the file, or the disk is read-only
            if _has_ended(host, process, left):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return _temporary_name(path)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.tmp")


def _has_ended(host: str, process: str, left: Path) -> bool:
    """Return True if the process that wrote the temporary file `left` has ended.

    A process on another host is assumed to have ended if its file is old.
    """
    if host != platform.node():
        return time.time() - left.stat().st_mtime > _ABANDONED_S
    try:
        os.kill(int(process), 0)
    except (OSError, ValueError, OverflowError) as error:  # ValueError: no PID in the name
        return isinstance(error, ProcessLookupError)
    return False


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """If the block raises an OSError without a file name, set its file name to `path`.

    Python does not add the file name to write errors.
    """
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename, error.strerror = str(path), os.strerror(error.errno)
        raise


class Hdf5Output(io.FileIO):
    """Output file for HDF5 that hides write errors, because they would crash the HDF5 library.

    Every write appears to succeed.  After the first failed write, data are kept in memory, because
    HDF5 also crashes if it cannot read back its data.  `check` and the end of a `with` statement
    raise the error.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self.failure: OSError | None = None
        self.unwritten: list[tuple[int, bytes]] = []  # (offset, data)

    def write(self, data: bytes) -> int:
        offset, rest = self.tell(), memoryview(data)
        while rest and not self.failure:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.failure = error
        if self.failure:
            self.unwritten.append((offset, bytes(data)))
        return len(data)

    def readinto(self, buffer: memoryview) -> int:
        offset, view = self.tell(), memoryview(buffer)
        super().readinto(buffer)
        for start, data in self.unwritten:
            first, last = max(start, offset), min(start + len(data), offset + len(view))
            if first < last:
                view[first - offset : last - offset] = data[first - start : last - start]
        return len(view)

    def truncate(self, size: int) -> int:
        return size if self.failure else super().truncate(size)

    def __exit__(self, *_: object) -> None:
        self.close()
        self.check()

    def check(self) -> None:
        """Raise the error of the first failed write, if any."""
        if self.failure:
            raise self.failure
