"""A segment: what one rank recorded between two flushes, closed and safe on disk.

    RUN/trace/rank-00003-0000.npz    of rank 3: header and strings (JSON), events, steps, memory,
                                     samples of its host's clock, evaluations,
                                     loads of experts, losses of their routers

A killed run loses at most the segment that was not yet closed.  `hpc3d.trace.file.merge` makes
one file of all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.trace.schema import (
    CLOCK_SAMPLES,
    EVALUATION,
    EVENTS,
    EXPERTS,
    MEMORY,
    ROUTERS,
    STEPS,
    VERSION,
    record_type,
)

TABLES = {
    "events": EVENTS,
    "steps": STEPS,
    "memory": MEMORY,
    "samples": CLOCK_SAMPLES,
    "evaluation": EVALUATION,
    "experts": EXPERTS,
    "routers": ROUTERS,
}
_NAME = re.compile(r"rank-(\d{5,})-(\d{4,})\.npz")


class Segment(NamedTuple):
    """Header and record arrays of a segment; its indices count within the segment."""

    header: dict
    events: np.ndarray
    steps: np.ndarray
    memory: np.ndarray
    samples: np.ndarray
    # Older segments have none of these.
    evaluation: np.ndarray = np.zeros(0, record_type(EVALUATION))
    experts: np.ndarray = np.zeros(0, record_type(EXPERTS))
    routers: np.ndarray = np.zeros(0, record_type(ROUTERS))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name that takes the place of `path`, safe on disk, if the block succeeds."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        with suppress(OSError):  # of a disk that went read-only
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """An OSError that names no file, as those of writing do, names this one, in one line."""
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            error.filename, error.strerror = str(path), os.strerror(error.errno)
        raise


def segment_path(run_dir: Path | str, rank: int, number: int) -> Path:
    """Where the `number`-th segment of a rank lies."""
    return Path(run_dir) / "trace" / f"rank-{rank:05d}-{number:04d}.npz"


def count_segments(run_dir: Path | str) -> dict[int, int]:
    """{rank: number of segments} of a run, counted to the last one; empty without a trace."""
    count: dict[int, int] = {}
    for path in sorted((Path(run_dir) / "trace").glob("rank-*.npz")):
        if match := _NAME.fullmatch(path.name):
            rank, number = map(int, match.groups())
            count[rank] = max(count.get(rank, 0), number + 1)
    return dict(sorted(count.items()))


def write_segment(
    path: Path | str, header: Mapping[str, Any], strings: Iterable[str], *tables: np.ndarray
) -> None:
    """Write a segment: afterwards it is whole and on disk, or not there at all.

    `header` is plain data (JSON); the tables are record arrays, those of `TABLES` in their order,
    of which the last may be left out.
    `events["name"]` indexes `strings`, `events["group"]` indexes `header["groups"]`, and
    `events["parent"]` the rows of this segment.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**header, "strings": list(strings)}).encode()
    named: dict[str, Any] = dict(zip(TABLES, tables, strict=False))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, header=np.frombuffer(text, "u1"), **named)


def read_segment(path: Path, rank: int) -> Segment:
    """A segment of `rank`; ValueError if it is truncated, damaged or inconsistent."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            segment = Segment(header, **{name: arrays[name] for name in TABLES if name in arrays})
        _check(segment, rank)
    except Exception as error:  # on damaged bytes zipfile, NumPy and json raise nearly anything
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{Path(path).name} cannot be read ({reason})") from error
    return segment


def _check(segment, rank):
    header, events = segment.header, segment.events
    for columns, table in zip(TABLES.values(), segment[1:]):
        if table.dtype != record_type(columns):
            raise ValueError(f"its columns are not those of version {VERSION}")
        own = "rank" not in table.dtype.names or (table["rank"] == rank).all()
        if header["rank"] != rank or not own:
            raise ValueError(f"it has rows of other ranks than {rank}")
    limits = {"name": header["strings"], "group": header["groups"], "parent": events}
    for column, target in limits.items():
        if (events[column] < -1).any() or (events[column] >= len(target)).any():
            raise ValueError(f"its column {column} points outside of the segment")
