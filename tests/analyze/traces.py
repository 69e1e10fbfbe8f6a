"""Traces of pipelines: of small runs on threads, and with chosen times."""

import h5py
import numpy as np

from hpc3d import trace
from hpc3d.benchmarks.harness import RandomBatches
from hpc3d.comm import threads
from hpc3d.config.load import load, to_toml
from hpc3d.config.resolve import resolve
from hpc3d.pipeline.instruction import parse
from hpc3d.trace import schema
from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder
from hpc3d.trace.segment import TABLES, segment_path, write_segment
from hpc3d.training.evaluator import Evaluator
from hpc3d.training.trainer import Trainer

STEPS = 3
TINY = {
    "model.layers": 8,
    "model.hidden": 8,
    "model.heads": 2,
    "model.sequence": 4,
    "train.batch": 24,
    "train.steps": STEPS,
}


def config_of(ranks, **values):
    given = {key.replace("__", "."): value for key, value in values.items()}
    words = [str(word) for key, value in (TINY | given).items() for word in (f"--{key}", value)]
    return resolve(load(None, words), ranks)


def header(config, rank, ranks):
    sizes = config.sizes()
    return {
        "rank": rank,
        "world_size": ranks,
        "axes": list(sizes),
        "axis_sizes": list(sizes.values()),
        "coords": [0] * len(sizes),
        "host": "node0",
        "local_rank": rank,
        "device": "cpu",
        "pid": rank,
        "run_id": "tiny",
        "created_utc": "2025-01-02T03:04:05Z",
        "time_unit": "ns",
        "config": to_toml(config),
        "git": "",
        "mpi": "",
        "version": 1,
        "dropped": 0,
    }


class Held(RandomBatches):
    """Validation data for an evaluation."""

    count = 2


def trained(folder, ranks, evaluate=False, **values):
    """Train a complete run on threads, optionally with evaluations; return its trace."""
    config = config_of(ranks, **values)

    def rank(mesh):
        recorder = Recorder(folder, header(config, mesh.rank, ranks))
        batches = Held(config, 17) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, 17, batches)
        evaluator = Evaluator(trainer, batches and [batches]) if evaluate else None
        for number in range(config.train.steps):
            trainer.step(number)
            if evaluator:
                evaluator.evaluate(number)
        recorder.flush()

    folder.mkdir(exist_ok=True)
    threads.run(config.sizes(), rank)
    merge(folder)
    return folder


def opened(folder):
    return trace.open(folder / "trace.h5")


MS = 1_000_000
CODES = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
COMPUTE, COMM = (schema.CATEGORY.index(name) for name in ("compute", "comm"))
BEHIND = 1000 * MS


def event(text, start, dur, op="gemm", phase=None, **values):
    """Return an event of the pass written as `text`, from `start` for `dur` milliseconds."""
    what = parse(text)
    found = {
        "phase": schema.PHASE.index(phase or CODES[what.op]),
        "op": schema.OP.index(op),
        "category": COMM if op in ("send", "recv", "all_reduce") else COMPUTE,
        "t_start": start * MS,
        "dur": dur * MS,
        "microbatch": what.mb,
        "chunk": what.chunk,
    }
    return {"group": -1, "parent": -1, "step": 1, **found, **values}


def by_hand(folder, events, steps=(0, 1), durations=(0, 50), **values):
    """Return a run with the events {rank: list}, and with steps of `durations` [ms] on all ranks.
    Each rank is a stage, unless its events specify another one. The clock of every rank is one
    second behind that of the previous rank."""
    ranks = len(events)
    config = config_of(ranks, **{"mesh__p": ranks, **values})
    for rank, rows in events.items():
        own = [{"stage": rank, **row, "t_start": row["t_start"] - rank * BEHIND} for row in rows]
        ends = [
            {"step": step, "t_end": dur * MS, "loss": 2} for step, dur in zip(steps, durations)
        ]
        tables = {"events": own, "steps": ends, "memory": [{}], "samples": []}
        top = {**header(config, rank, ranks), "groups": []}
        path = segment_path(folder, rank, 0)
        write_segment(path, top, ["event"], *(records(rank, *table) for table in tables.items()))
    merge(folder)
    with h5py.File(folder / "trace.h5", "r+") as file:
        ahead = file["events/rank"][:].astype("i8") * BEHIND
        file["events/t_global"][:] = file["events/t_start"][:] + ahead
    return folder


def records(rank, name, rows):
    """Return a segment table with rows of the given values; all others are 0."""
    table = np.zeros(len(rows), schema.record_type(TABLES[name]))
    table["rank"] = rank
    for place, row in enumerate(rows):
        for key, value in row.items():
            table[key][place] = value
    return table
