"""Train a Transformer on a mesh of ranks.

    mpirun -np N python -m hpc3d.train [INPUT.toml] [--section.key value ...] [--resume RUN_DIR]

Without INPUT: the default model on the best cuboid of N ranks.  Any value of the input file can be
given as an option (--train.steps 100).  With --resume the run in RUN_DIR goes on from its newest
whole checkpoint (checkpoint.every), on the same or any other layout.  The run is kept in
results/<name>-<stamp>/: configuration, environment, train.log, checkpoints and trace.h5, which
`python -m hpc3d.report` reads.

SIGTERM, the signal of run.signal, train.max_minutes and a file STOP in that folder end the run
behind the step that runs, with everything saved.

Exit codes: 0 done; 2 bad input (one line each, nothing started); 75 stopped early, go on with
--resume; 3 something computed is wrong; 4 a loss or gradient is not finite; 5 nothing moved for
run.watchdog_s; 1 a rank failed (the job ends).
"""

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from hpc3d.cluster import launch
from hpc3d.cluster.exits import STOPPED, Ended


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
    from hpc3d.training.recording import CLOCKS, recorded
    from hpc3d.training.resume import resume
    from hpc3d.training.stop import Stop

    config = plan.config
    launch.stop_when_told(job, config.run.signal)
    mesh = build(config.mesh.sizes(), transport=config.mesh.transport)
    mesh = recorded(job, mesh, config, plan.folder, plan.git)
    log = Log(plan.folder / "train.log", job.rank == 0, "a" if plan.resumed else "w")
    log.header(plan, mesh, job)
    batches = reader.get("batches")
    _, clock = CLOCKS[config.trace.clock]
    trainer = Trainer(mesh, config, config.model.vocabulary, batches, program, clock)
    for line in plan.changes:
        log.say(f"resume: {line}")
    start = resume(job, plan.folder, trainer, log.say) if plan.resumed else 0
    saver = saver_of(plan, trainer, batches)
    stop = Stop(job, plan.folder, config.train.max_minutes)
    done = steps(plan, trainer, saver, stop, log, start)
    saver.wait()
    mesh.trace.synchronise()
    launch.unwatch()
    save_position(plan, batches, done)
    launch.finish(job)
    job.barrier()
    if job.rank == 0 and config.trace.enabled:
        from hpc3d.trace.merge import merge

        merge(plan.folder)
    log.say(f"run kept in {plan.folder}")
    job.barrier()
    if done < config.train.steps:
        raise Ended(STOPPED)


def steps(plan, trainer, saver, stop, log, start):
    """The steps from `start` on, until the last one or a wish to stop; how many are done."""
    from hpc3d.training.stop import reason

    config, trace = plan.config, trainer.mesh.trace
    for number in range(start, config.train.steps):
        launch.watch(config.run.watchdog_s)
        if number % config.trace.sync_every == 0:
            trace.synchronise()
        step = trainer.step(number, stop.wish)
        log.step(step)
        saver.after(number)
        if step.wish and number + 1 < config.train.steps:
            saved = saver.stop(number)
            log.say(
                f"stopped behind step {number}, for {reason(step.wish)}; "
                + (f"go on with --resume {plan.folder}" if saved else "nothing is saved")
            )
            return number + 1
    return config.train.steps


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
    from hpc3d.training.resume import changes, fitted, run_to_resume
    from hpc3d.training.tokens import open_tokens

    run = run_to_resume(words)
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
    changed = changes(run, config) if run else []
    text = values.to_toml(config)
    where = folder.reopen(run, text) if run else folder.create(config, text)
    return Plan(config, where, folder.git_revision(), bool(run), changed)


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


def save_position(plan, batches, done):
    """Rank 0: where in the data the run ended, for one that goes on from here."""
    if batches is not None:
        position = {"step": done, **batches.position(done)}
        (plan.folder / "position.json").write_text(json.dumps(position) + "\n")


def find(path):
    """`path` from here, or from the source tree, where the shipped corpus lies."""
    shipped = Path(__file__).parent.parent / path
    return shipped if not Path(path).exists() and shipped.exists() else path


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
