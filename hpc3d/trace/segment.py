"""Segment files of a trace; each contains one rank's events since the rank's previous segment.

    RUN/trace/rank-00003-0000.npz    of rank 3: header and strings (JSON), events, steps, memory,
                                     samples of its host's clock, evaluations,
                                     expert loads, router losses, validation losses

Segments are synced to disk, so a run that is killed loses only the events since the last segments.
`hpc3d.trace.merge.merge` merges all segments into one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.console.small_files import replacing
from hpc3d.trace.schema import (
    CLOCK_SAMPLES,
    EVALUATION,
    EVENTS,
    EXPERTS,
    MEMORY,
    ROUTERS,
    STEPS,
    VALIDATION,
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
    "validation": VALIDATION,
}
_NAME = re.compile(r"rank-(\d{5,})-(\d{4,})\.npz")


class Segment(NamedTuple):
    """Header and record arrays of a segment. All indices refer to this segment only."""

    header: dict
    events: np.ndarray
    steps: np.ndarray
    memory: np.ndarray
    samples: np.ndarray
    # Segments written by older versions lack the following tables.
    evaluation: np.ndarray = np.zeros(0, record_type(EVALUATION))
    experts: np.ndarray = np.zeros(0, record_type(EXPERTS))
    routers: np.ndarray = np.zeros(0, record_type(ROUTERS))
    validation: np.ndarray = np.zeros(0, record_type(VALIDATION))


def segment_path(run_dir: Path | str, rank: int, number: int) -> Path:
    """Return the path of a rank's segment with the zero-based index `number`."""
    return Path(run_dir) / "trace" / f"rank-{rank:05d}-{number:04d}.npz"


def count_segments(run_dir: Path | str) -> dict[int, int]:
    """Return a dict that maps each rank to its number of segments (last index plus 1)."""
    count: dict[int, int] = {}
    for path in sorted((Path(run_dir) / "trace").glob("rank-*.npz")):
        if match := _NAME.fullmatch(path.name):
            rank, number = map(int, match.groups())
            count[rank] = max(count.get(rank, 0), number + 1)
    return dict(sorted(count.items()))


def write_segment(
    path: Path | str, header: Mapping[str, Any], strings: Iterable[str], *tables: np.ndarray
) -> None:
    """Write a segment to disk atomically, so that `path` never contains an incomplete segment.

    `header` must be serializable as JSON.  The tables are record arrays in the order of `TABLES`;
    trailing tables may be omitted.  `events["name"]` is an index into `strings`, `events["group"]`
    into `header["groups"]`, and `events["parent"]` into the events of this segment.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**header, "strings": list(strings)}).encode()
    named: dict[str, Any] = dict(zip(TABLES, tables, strict=False))
    with replacing(path, crowded=True) as temporary, temporary.open("wb") as file:
        np.savez(file, header=np.frombuffer(text, "u1"), **named)


def read_segment(path: Path, rank: int) -> Segment:
    """Read a segment of `rank`; raise ValueError if it is damaged or inconsistent."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            segment = Segment(header, **{name: arrays[name] for name in TABLES if name in arrays})
        _check(segment, rank)
    except Exception as error:  # damaged files raise many types of exceptions
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{Path(path).name} cannot be read ({reason})") from error
    return segment


def _check(segment, rank):
    header, events = segment.header, segment.events
    for columns, table in zip(TABLES.values(), segment[1:]):
        if table.dtype != record_type(columns):
            raise ValueError(f"its columns differ from those of version {VERSION}")
        own = "rank" not in table.dtype.names or (table["rank"] == rank).all()
        if header["rank"] != rank or not own:
            raise ValueError(f"it contains rows of ranks other than {rank}")
    limits = {"name": header["strings"], "group": header["groups"], "parent": events}
    for column, target in limits.items():
        if (events[column] < -1).any() or (events[column] >= len(target)).any():
            raise ValueError(f"its column {column} contains an invalid index")
