"""Estimate the disk space and write time of checkpoints before the first step."""

from __future__ import annotations

import hashlib
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc3d.checkpoints.sharded import shares, steps_of
from hpc3d.console.sanitize import reason_of
from hpc3d.console.small_files import replacing

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job
    from hpc3d.training.trainer import Trainer

_LARGEST = 4 << 20  # maximum size in bytes of the file written to measure the disk bandwidth
_FILES = 2  # number of files written by each rank per checkpoint


class Probe(NamedTuple):
    """Disk and hash costs in seconds: per small file, per byte written, and per byte hashed."""

    file: float
    write: float
    digest: float


def forecast(job: Job, folder: Path, trainer: Trainer, keep: int) -> list[str]:
    """Return log lines with the size and estimated write time of a run's checkpoints.

    All ranks must call this function. One rank of each node measures the disk speed by writing a
    few megabytes to `folder`. If a write fails, the job stops with an error.
    """
    outer, every = trainer.outer, trainer.config.checkpoint.every
    agreed = outer is None or outer.is_agreed(every - 1)
    share = shares(trainer.parameters, trainer.optimizer, agreed)
    host, size = socket.gethostname(), sum(elements.nbytes for *_, elements in share)
    ranks = job.gather((host, size))
    found = problem = None
    if [other for other, _ in ranks].index(host) == job.rank:
        try:
            found = probe(folder, host, min(_LARGEST, sum(size for _, size in ranks)))
        except OSError as error:
            problem = f"{host} cannot write its checkpoints to {folder}: {reason_of(error)}"
    probes, problems = zip(*job.gather((found, problem)), strict=True)
    if any(problems):
        job.refuse(*filter(None, problems))
    total, fullest = sum(size for _, size in ranks), max(size for _, size in ranks)
    told = (
        f"checkpoints: {total / 1e6:.1f} MB each, at most {fullest / 1e6:.1f} MB per rank; "
        f"{keep} are kept; estimated time per checkpoint "
        f"{seconds(ranks, [*filter(None, probes)]):.2g} s"
    )
    return [told, *filter(None, [shortage(folder, total, keep)])]


def probe(folder: Path, host: str, size: int) -> Probe:
    """Measure the time to write files to a folder, flush them to disk, and hash their data."""
    path, block = folder / f"probe-{host}", np.random.default_rng(0).bytes(size)
    small, large = timed(partial(_written, path, block[:1])), timed(partial(_written, path, block))
    digest = timed(partial(hashlib.sha256, block))
    path.unlink()
    return Probe(small, max(0.0, large - small) / size, digest / size)


def _written(path: Path, block: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(block)


def timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def seconds(ranks: Sequence[tuple[str, int]], probes: Sequence[Probe]) -> float:
    """Return the estimated time of a checkpoint in seconds.

    All nodes write their shards concurrently, then rank 0 reads all of them. `ranks` lists (host,
    bytes) for each rank, and `probes` lists the Probe of each node. The estimate uses the
    maximum of each time over all probes.
    """
    slowest = Probe(*map(max, zip(*probes, strict=True)))
    count, held = Counter(host for host, _ in ranks), Counter()
    for host, size in ranks:
        held[host] += size
    written = _FILES * max(count.values()) * slowest.file
    written += max(held.values()) * (slowest.write + slowest.digest)
    return written + sum(held.values()) * slowest.digest


def shortage(folder: Path, size: int, keep: int) -> str | None:
    """Return a warning if the disk cannot store `keep` + 1 checkpoints, otherwise `None`."""
    present = steps_of(folder / "checkpoints")
    has = sum(path.stat().st_size for step in present for path in step.iterdir())
    free, wanted = shutil.disk_usage(folder).free + has, (keep + 1) * size
    if free >= wanted:
        return None
    return (
        f"checkpoints: {keep + 1} checkpoints need {wanted / 1e6:.1f} MB, but {folder} has only "
        f"{free / 1e6:.1f} MB free; delete files, or reduce checkpoint.keep"
    )
