"""Going on with a run: its folder, what changes, the state of its newest whole checkpoint."""

from dataclasses import replace
from math import prod
from pathlib import Path

from hpc3d.config import MeshConfig, flat, load
from hpc3d.training import saver


def run_to_resume(words):
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
    mesh = config.mesh
    if prod(mesh.sizes().values()) == ranks or None in (mesh.x, mesh.y, mesh.z):
        return config
    stages = mesh.p * mesh.d
    kept = {"p": mesh.p, "d": mesh.d} if ranks % stages == 0 else {}
    mesh = MeshConfig(**kept, order=mesh.order, transport=mesh.transport)
    freed = {} if kept else {"schedule": None, "chunks": None, "stages": None, "zero": 0}
    return replace(config, mesh=mesh, parallel=replace(config.parallel, **freed))


def changes(run, config):
    """A line for each setting that is not what it was in the run."""
    before, now = flat(load(run / "config.toml", [])), flat(config)
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if before[key] != now[key]]


def resume(job, run, trainer, say):
    """Take the state of the newest whole checkpoint of a run; the number of the next step.

    `say(line)` is told which one that is, and what is wrong with those after it.
    """

    def share(opened):
        """What is wrong with the files, of which each rank reads some."""
        return [line for line in job.gather(opened.damage(job.rank, job.size)) if line]

    try:
        opened, wrong = saver.newest(run, share)
        start = saver.resume(opened, trainer)
    except ValueError as error:
        job.refuse(str(error))
    if start >= trainer.config.train.steps:
        job.refuse(f"--resume: {start} steps are done; ask for more with --train.steps")
    for line in wrong:
        say(f"resume: {line}")
    say(f"resume: step {start} follows {opened.folder}")
    return start
