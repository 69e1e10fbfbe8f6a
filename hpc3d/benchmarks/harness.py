"""Paired benchmarks: two variants run alternately, and the median time ratio is reported."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hpc3d import trace
from hpc3d.analyze.metrics.step import step_seconds
from hpc3d.comm.threads import meshes
from hpc3d.config.input_file import Config
from hpc3d.console.sanitize import Problems, counted
from hpc3d.runtime.mpi_launcher import launch_settings
from hpc3d.trace.reader import Trace
from hpc3d.trace.recorder import Recorder
from hpc3d.training.log import KEPT
from hpc3d.training.trainer import Step, Trainer

log = logging.getLogger(__name__)
_BUSY = 0.1  # maximum share of the CPU time that other programs may use without a warning
_VOCABULARY = 256  # of the models that are measured


@contextmanager
def watched() -> Iterator[dict[str, float | None]]:
    """Measure the load by other programs during a benchmark, and print it if it exceeds 10 %.

    The load is the share of the CPU time of all cores that processes other than this one and its
    finished children used; it is the value of `other_load` in the returned dict, or `None` if
    /proc/stat does not exist.
    """
    found: dict[str, float | None] = {"other_load": None}
    start = _cpu_seconds()
    yield found
    if start:
        busy, total, own = (now - then for now, then in zip(_cpu_seconds(), start, strict=True))
        load = found["other_load"] = max(0.0, busy - own) / total
        if load > _BUSY:
            print(
                f"other programs used {load:.0%} of the CPU time during this measurement; for "
                "reliable times, repeat it on an idle machine"
            )


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Return the busy and the total CPU time of the machine and the CPU time of this program."""
    try:
        first = Path("/proc/stat").read_text("ascii").splitlines()[0]
    except OSError:
        return None
    ticks = [int(each) for each in first.split()[1:9]]
    idle, total = sum(ticks[3:5]), sum(ticks)
    unit = os.sysconf("SC_CLK_TCK")
    return (total - idle) / unit, total / unit, sum(os.times()[:4])


class RandomBatches:
    """Batches of random tokens, for measurements that do not need training text."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        self.shape = (2, config.train.batch, config.model.sequence)
        self.vocabulary = vocabulary

    def batch(self, step: int) -> np.ndarray:
        return np.random.default_rng(step).integers(0, self.vocabulary, self.shape, np.int32)


def _alternate(rounds: int, *functions: Callable[[], object]) -> np.ndarray:
    """Call the functions alternately, and return their times in s, shape [functions, rounds].

    The times of an additional warm-up round are discarded.
    """
    times = np.empty((rounds + 1, len(functions)))
    for number, row in enumerate(times):
        log.info("round %d of %d", number, rounds)
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            row[index] = time.perf_counter() - start
    return times[1:].T


def ratios(
    ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray
) -> dict[str, Any]:
    """Return the median of each series, and the minimum, median and maximum pairwise ratio."""
    pairs = np.asarray(ours) / np.asarray(theirs)
    return {
        "ours_s": float(median(ours)),
        "theirs_s": float(median(theirs)),
        "ratio": float(median(pairs)),
        "ratio_min": float(pairs.min()),
        "ratio_max": float(pairs.max()),
    }


def serial_trainer(config: Config, recorder: Recorder | None = None) -> Trainer:
    """Return a single-rank trainer that does not use MPI."""
    (mesh,), _ = meshes({})
    mesh = mesh.traced(recorder) if recorder else mesh
    return Trainer(mesh, config, _VOCABULARY, RandomBatches(config, _VOCABULARY))


def _steps_of(trainer: Trainer) -> Callable[[], Step]:
    numbers = iter(range(sys.maxsize))
    return lambda: trainer.step(next(numbers))


def against_torch(config: Config, rounds: int) -> dict[str, Any]:
    """Compare the step times of hpc3d and of PyTorch in eager mode.

    Both run alternately in this process, on one thread.
    """
    from hpc3d.benchmarks import torch_reference

    trainer = serial_trainer(config)
    batch = RandomBatches(config, _VOCABULARY).batch(0)
    theirs = torch_reference.training_step(trainer.parameters, trainer.shape, config.train, *batch)
    return ratios(*_alternate(rounds, _steps_of(trainer), theirs))


def tracing(config: Config, rounds: int) -> dict[str, Any]:
    """Compare serial step times with and without tracing, and measure the cost of one event."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, {"rank": 0}, capacity=1 << 20)
        traced, plain = serial_trainer(config, recorder), serial_trainer(config)
        result = ratios(*_alternate(rounds, _steps_of(traced), _steps_of(plain)))
        events = recorder.count / (rounds + 1)
        start = time.perf_counter()
        for _ in range(10_000):
            with recorder.span("nothing"):
                pass
        result["event_us"] = (time.perf_counter() - start) * 100
    return {**result, "events": events}


def overhead(path: str, options: Sequence[str], ranks: int, rounds: int) -> dict[str, Any]:
    """Compare the step time on `ranks` ranks with the step time of one rank on all cores.

    The two runs alternate. The result also contains the CPU time of each operation, summed over
    ranks.
    """
    many, one = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            log.info("round %d of %d", number + 1, rounds)
            many.append(run(ranks, [path, *options], folder))
            serial = [path, *options, *["--mesh.x", "1", "--mesh.y", "1", "--mesh.z", "1"]]
            one.append(run(1, serial, folder))
        result = ratios([m["step_s"] for m in many], [o["step_s"] for o in one])
        clock = ["--trace.clock", "cpu"]
        result["processor"] = run(ranks, [path, *options, *clock], folder)["seconds"]
        result["processor_serial"] = run(1, [*serial, *clock], folder)["seconds"]
    return {**result, "first_step_s": median(m["first_s"] for m in many)}


def overlap(path: str, options: Sequence[str], ranks: int, rounds: int) -> dict[str, Any]:
    """Compare the time of the gradient reduction over replicas with and without overlap.

    Replicas are the ranks along mesh axis d. The result contains the reduction time in s and the
    received bytes, per step and rank. The number of bytes should be the same with and without
    overlap.
    """
    found = {"true": [], "false": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            log.info("round %d of %d", number + 1, rounds)
            for value, runs in found.items():
                how = [path, *options, "--parallel.overlap", value]
                runs.append(run(ranks, how, folder, steps=6)["data"])
    ours, theirs = found.values()
    result = ratios([one["seconds"] for one in ours], [one["seconds"] for one in theirs])
    received = sorted({one["bytes"] for one in [*ours, *theirs]})
    return {**result, "bytes": received}


def switched(
    path: str, options: Sequence[str], ranks: int, rounds: int, switch: Sequence[str]
) -> dict[str, Any]:
    """Compare step times with and without the options in `switch`, in alternating runs."""
    found: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            log.info("round %d of %d", number + 1, rounds)
            for more, seconds in zip((switch, ()), found):
                seconds.append(run(ranks, [path, *options, *more], folder, steps=6)["step_s"])
    return ratios(*found)


def run(
    ranks: int,
    arguments: Sequence[str],
    folder: str,
    steps: int = 4,
    verb: str = "train",
    threads: int | None = None,
) -> dict[str, Any]:
    """Run a few steps with `python -m hpc3d.VERB ...`, and return the measurements of the run.

    Returns
    -------
    first_s : seconds from the start of the launcher to the end of the first step
    step_s : median step time in seconds
    seconds : dict from operation to seconds per step, summed over ranks
    data : communication time in s and received bytes along axis d, per rank and step
    folder : folder of the run
    """
    words = [verb, *arguments, "--train.steps", str(steps), "--run.out", folder]
    start, first = time.perf_counter(), None
    for line in printed(ranks, words, threads):
        if first is None and re.match(r" +0 ", line):
            first = time.perf_counter() - start
        number = re.match(r" *(\d+) +\S+ +\S+ +\S+ ", line)
        if number and int(number[1]) < steps:
            log.info(
                "training on %s: step %d of %d", counted(ranks, "rank"), int(number[1]) + 1, steps
            )
    where = Path(line.removeprefix(KEPT).strip())
    with trace.open(where / "trace.h5") as recorded:
        return {"first_s": first, "folder": where, **_times(recorded)}


def printed(ranks: int, words: Sequence[str], threads: int | None = None) -> Iterator[str]:
    """Run `python -m hpc3d.VERB ...` on `ranks` ranks, and yield its output line by line.

    By default, a single rank has one thread per core, and several ranks share the cores.
    Raises Problems if the command fails.
    """
    launcher = shutil.which("mpirun") or str(Path(sys.executable).with_name("mpirun"))
    verb, *arguments = words
    command = [launcher, "-np", str(ranks), sys.executable, "-m", f"hpc3d.{verb}", *arguments]
    if threads is None and ranks == 1:
        threads = len(os.sched_getaffinity(0))
    settings = {
        **os.environ,
        **launch_settings(),
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        "NO_COLOR": "1",
    }
    with tempfile.TemporaryFile("w+") as errors:
        pipe = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, env=settings, **pipe) as process:
            yield from process.stdout
        if process.returncode:
            errors.seek(0)
            raise Problems([f"{' '.join(command)} failed:", *errors.read().splitlines()])


def wall_times(recorded: Trace, first: int) -> np.ndarray:
    """Return the times in s of the steps of rank 0, starting with step `first`."""
    steps = recorded.steps
    return step_seconds(recorded)[(steps["rank"] == 0) & (steps["step"] >= first)]


def _times(recorded: Trace) -> dict[str, Any]:
    """Return the median step time and each operation's time in s, excluding the first step."""
    events, spans = recorded.events, wall_times(recorded, first=1)
    names = np.array(recorded.strings)[events["name"]]
    inside, seconds = events["step"] > 0, {}
    for name in np.unique(names[inside]):
        total = events["dur"][inside & (names == name)].sum() * 1e-9
        seconds[str(name)] = float(total / len(spans))
    data = _calls_along(recorded, "d", len(spans))
    return {"step_s": float(np.median(spans)), "seconds": seconds, "data": data}


def _calls_along(recorded: Trace, axis: str, steps: int) -> dict[str, Any]:
    """Return the communication time [s] and received bytes along a mesh axis, per rank and step.

    The first step is excluded.
    """
    groups = [number for number, group in enumerate(recorded.groups) if group.axis == axis]
    events = recorded.events
    calls = np.isin(events["group"], groups) & (events["step"] > 0)
    count = steps * recorded.attrs["world_size"]
    seconds, received = (float(events[key][calls].sum()) / count for key in ("dur", "bytes"))
    return {"seconds": seconds * 1e-9, "bytes": received}


def with_sizes(config: Config, **sizes: Any) -> Config:
    """Return a copy of `config` with new model sizes, and optionally a new batch size `batch`."""
    batch = sizes.pop("batch", config.train.batch)
    model = replace(config.model, **sizes)
    return replace(config, model=model, train=replace(config.train, batch=batch))
