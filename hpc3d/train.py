"""Train a Transformer on a mesh of ranks.

    mpirun -np N python -m hpc3d.train [INPUT.toml] [--section.key value ...] [--resume RUN_DIR]

Without INPUT: the default model on the best cuboid of N ranks.  Any value of the input file can be
given as an option (--train.steps 100).  With --resume the run in RUN_DIR goes on from its newest
whole checkpoint (checkpoint.every), on the same or any other layout.  The run is kept in
results/<name>-<stamp>/: configuration, environment, train.log, checkpoints and trace.h5, which
`python -m hpc3d.report` reads.

Exit codes: 0 done, 2 bad input (one line each, nothing started), 1 a rank failed (the job ends).
"""

import json
import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import NamedTuple

from hpc3d import __version__
from hpc3d.cluster import launch

# What the trace and what the training loop reads, in ns and in s: the same clock.
CLOCKS = {
    "wall": (time.monotonic_ns, time.monotonic),
    "processor": (time.process_time_ns, time.process_time),
}


class Plan(NamedTuple):
    """What rank 0 tells the others before the first step."""

    config: object
    folder: Path
    git: str
    resumed: bool
    changes: list


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    return launch.run("train", lambda job: train(job, list(words)))


def train(job, words):
    """The whole run on one rank."""
    if {"-h", "--help"} & set(words):
        job.agree(explain)
        return
    reader = {}
    plan = job.agree(lambda: prepare(job, words, reader))
    program = job.deal(lambda: programs(plan.config, reader["program"]))
    from hpc3d.cluster.cart import build
    from hpc3d.training.loop import Trainer

    mesh = build(plan.config.mesh.sizes(), transport=plan.config.mesh.transport)
    mesh = traced(job, mesh, plan)
    log = Log(plan.folder / "train.log", job.rank == 0, "a" if plan.resumed else "w")
    log.header(plan, mesh, job)
    batches = reader.get("batches")
    _, clock = CLOCKS[plan.config.trace.clock]
    trainer = Trainer(mesh, plan.config, plan.config.model.vocabulary, batches, program, clock)
    start = resume(job, plan, trainer, log) if plan.resumed else 0
    saver = saver_of(plan, trainer, batches)
    for number in range(start, plan.config.train.steps):
        launch.watch(plan.config.run.watchdog_s)
        if number % plan.config.trace.sync_every == 0:
            mesh.trace.synchronise()
        log.step(trainer.step(number))
        saver.after(number)
    saver.wait()
    mesh.trace.synchronise()
    launch.unwatch()
    save_position(plan, batches)
    launch.finish(job)
    job.barrier()
    if job.rank == 0 and plan.config.trace.enabled:
        from hpc3d.trace.merge import merge

        merge(plan.folder)
    log.say(f"run kept in {plan.folder}")
    job.barrier()


def explain():
    """Rank 0: what the command does, and every key with its default."""
    from hpc3d import config

    print(f"{__doc__}\nKeys and defaults:\n\n{config.to_toml(config.Config())}")


def prepare(job, words, reader):
    """Rank 0: read the input, open the text, make the folder; ValueError for what is wrong."""
    from hpc3d import config as values
    from hpc3d.rules import settle
    from hpc3d.training import folder
    from hpc3d.training.data import Batches
    from hpc3d.training.program import program_of
    from hpc3d.training.tokens import open_tokens

    run = resumed_run(words)
    path = words.pop(0) if words and not words[0].startswith("-") else run and run / "config.toml"
    config = values.load(path, words)
    config = settle(fitted(config, job.size) if run else config, job.size, default=path is None)
    if config.train.dtype == "float16":
        raise ValueError(
            "train.dtype = float16: processors are slow at it; use float32, or simulate it"
        )
    tokens = open_tokens(find(config.data.path), config.data.tokenizer)
    vocabulary = config.model.vocabulary or tokens.vocabulary
    if vocabulary < tokens.vocabulary:
        raise ValueError(
            f"model.vocabulary = {vocabulary}: the tokenizer has {tokens.vocabulary} tokens; "
            f"use at least that, or leave the key out"
        )
    config = replace(config, model=replace(config.model, vocabulary=vocabulary))
    sizes = config.model.sequence, config.train.batch
    reader["batches"] = Batches(tokens, *sizes, config.seed)
    reader["program"] = program_of(config)
    changes = changed(run, config) if run else []
    text = values.to_toml(config)
    where = folder.reopen(run, text) if run else folder.create(config, text)
    return Plan(config, where, folder.git_revision(), bool(run), changes)


def resumed_run(words):
    """The folder that --resume names, which is taken out of the words; None without it."""
    if "--resume" not in words:
        return None
    place = words.index("--resume")
    run = Path((words[place + 1 : place + 2] or [""])[0])
    del words[place : place + 2]
    if not (run / "config.toml").is_file():
        raise ValueError(f"--resume {run}: no run is there; name a folder results/NAME-STAMP")
    return run


def fitted(config, ranks):
    """A stored configuration whose mesh gives way, where it is of another number of ranks."""
    from hpc3d.config import MeshConfig

    mesh = config.mesh
    if prod(mesh.sizes().values()) == ranks or None in (mesh.x, mesh.y, mesh.z):
        return config
    stages = mesh.p * mesh.d
    kept = {"p": mesh.p, "d": mesh.d} if ranks % stages == 0 else {}
    mesh = MeshConfig(**kept, order=mesh.order, transport=mesh.transport)
    freed = {} if kept else {"schedule": None, "chunks": None, "stages": None, "zero": 0}
    return replace(config, mesh=mesh, parallel=replace(config.parallel, **freed))


def changed(run, config):
    """A line for each setting that is not what it was in the run."""
    from hpc3d.config import flat, load

    before, now = flat(load(run / "config.toml", [])), flat(config)
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if before[key] != now[key]]


def resume(job, plan, trainer, log):
    """Take the state of the newest whole checkpoint; the number of the next step."""
    from hpc3d.training import saver

    def share(opened):
        """What is wrong with the files, of which each rank reads some."""
        return [line for line in job.gather(opened.damage(job.rank, job.size)) if line]

    try:
        opened, wrong = saver.newest(plan.folder, share)
        start = saver.resume(opened, trainer)
    except ValueError as error:
        job.refuse(str(error))
    if start >= plan.config.train.steps:
        job.refuse(f"--resume: {start} steps are done; ask for more with --train.steps")
    for line in [*plan.changes, *wrong]:
        log.say(f"resume: {line}")
    log.say(f"resume: step {start} follows {opened.folder}")
    return start


def saver_of(plan, trainer, batches):
    from hpc3d.config import to_toml
    from hpc3d.training.saver import Saver

    def header(done):
        position = batches.position(done) if batches else None
        return {"run_id": plan.folder.name, "config": to_toml(plan.config), "position": position}

    return Saver(plan.folder, trainer, plan.config.checkpoint, header)


def programs(config, program):
    """Rank 0: what each rank runs, the part of its pipeline stage."""
    sizes = config.mesh.sizes()
    axes, shape = list(sizes), list(sizes.values())
    inner = prod(shape[axes.index("p") + 1 :])
    stages = [rank // inner % config.mesh.p for rank in range(prod(shape))]
    return [program.of(stage) for stage in stages]


def save_position(plan, batches):
    """Rank 0: where in the data the run ended, for one that goes on from here."""
    if batches is not None:
        done = plan.config.train.steps
        position = {"step": done, **batches.position(done)}
        (plan.folder / "position.json").write_text(json.dumps(position) + "\n")


def find(path):
    """`path` from here, or from the source tree, where the shipped corpus lies."""
    shipped = Path(__file__).parent.parent / path
    return shipped if not Path(path).exists() and shipped.exists() else path


def traced(job, mesh, plan):
    """The mesh with a recorder, and the environment of the run on disk."""
    place = job.place()
    places = job.gather(place)
    if job.rank == 0:
        from hpc3d.training.folder import describe

        describe(plan.folder, places, job.library())
    if not plan.config.trace.enabled:
        return mesh
    from hpc3d.config import to_toml
    from hpc3d.trace.clock import Clocks
    from hpc3d.trace.recorder import Recorder

    header = {
        "rank": job.rank,
        "world_size": job.size,
        "axes": list(mesh.sizes),
        "axis_sizes": list(mesh.sizes.values()),
        "coords": [mesh.coord(axis) for axis in mesh.sizes],
        **place,
        "device": "cpu",
        "cores": os.cpu_count() or 0,
        "run_id": plan.folder.name,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "time_unit": "ns",
        "config": to_toml(plan.config),
        "git": plan.git,
        "mpi": job.library(),
        "version": __version__,
    }
    clock, _ = CLOCKS[plan.config.trace.clock]
    recorder = Recorder(plan.folder, header, clock=clock)
    if plan.config.trace.clock == "wall":
        hosts = [place["host"] for place in places]
        recorder.clocks = Clocks(mesh.world, hosts, recorder.clock)
    job.at_end.append(recorder.flush)
    return mesh.traced(recorder)


class Log:
    """The lines of rank 0, on the terminal and in train.log."""

    def __init__(self, path, speaks, mode="w"):
        self.file = path.open(mode) if speaks else None

    def say(self, line):
        if self.file:
            print(line, flush=True)
            print(line, file=self.file, flush=True)

    def header(self, plan, mesh, job):
        from hpc3d.config import to_toml

        config, split = plan.config, plan.config.split()
        sizes = " ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1)
        self.say(to_toml(config))
        self.say(f"{job.size} ranks: {sizes or 'serial'}; {job.library()}")
        self.say(f"scheme {config.parallel.scheme}: X{split.x}  W{split.w}  Y{split.y}")
        parallel, layers = config.parallel, [len(part) for part in config.layers()]
        self.say(
            f"schedule {parallel.schedule}: {parallel.microbatches} microbatches through parts of "
            f"{' '.join(map(str, layers))} layers; ZeRO {parallel.zero}"
        )
        if config.trace.clock == "processor":
            self.say("times are processor time: tokens/s are those of a second of rank 0's")
        self.say("step     loss  learning rate  gradient norm  tokens/s  communication  peak MB")

    def step(self, done):
        rate = done.tokens / done.seconds
        self.say(
            f"{done.number:4d} {done.loss:8.4f} {done.learning_rate:14.3e} {done.grad_norm:14.4f} "
            f"{rate:9.0f} {100 * done.communication:12.1f} % {done.peak / 1e6:8.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
