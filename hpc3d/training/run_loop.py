"""Training loop for any model: run the steps, handle early stops, and finish the run."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from hpc3d.arrays.host_store import store_of
from hpc3d.console.exit_codes import FAILED, STOPPED, JobExit
from hpc3d.console.sanitize import counted
from hpc3d.model.families import family_of
from hpc3d.runtime import launch
from hpc3d.runtime.other_processes import OtherProcesses
from hpc3d.runtime.stop_request import Stop, reason
from hpc3d.training.guard import GuardError, LossSpikes, ReplicaCheck, guarded, lines
from hpc3d.training.log import KEPT, STOPPED_AFTER, Log
from hpc3d.training.run_folder import FOLDER_FILE, note_environment, write_text

if TYPE_CHECKING:
    from hpc3d.comm.device_setup import Hardware
    from hpc3d.comm.mesh import Mesh, MeshRecorder
    from hpc3d.config.input_file import Config
    from hpc3d.runtime.job import Job
    from hpc3d.training.evaluator import Evaluator
    from hpc3d.training.trainer import Step, Trainer
    from hpc3d.training.watchdog import Watchdog

_NOT_FINITE = "(overflow|invalid value) encountered"  # beginning of NumPy's warnings


class RunSaver(Protocol):
    """Checkpoint saver (hpc3d.checkpoints.saver).

    `saved` is the number of completed steps at the last checkpoint.
    """

    saved: int

    def after(self, number: int, best: bool = False) -> None: ...
    def stop(self, number: int) -> bool: ...
    def wait(self) -> None: ...


class RunBatches(Protocol):
    """Batches of a run.

    `position(done)` returns the position in the training data after `done` completed steps, and
    `epochs(done)` the number of epochs of each text.
    """

    def position(self, done: int) -> dict[str, int]: ...
    def epochs(self, done: int) -> list[float]: ...


@dataclass
class RunPlan:
    """Description of a run, filled in gradually by rank 0 and then broadcast to all ranks.

    `resumed` is the folder of the run to resume, `folder` the folder of this run once it is open,
    and `git` the commit of the program.  `changes` has a line for each difference from the resumed
    run, `notes` has lines for the log, and `texts` describes the text files, for checkpoint
    manifests.
    """

    config: Config
    resumed: Path | None = None
    folder: Path = Path()
    git: str = ""
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class RunningJob(NamedTuple):
    """State of the training loop.

    Training starts at step `start`. `batches` is set only on rank 0.
    `evaluator` is `None` if the run has no evaluations.
    """

    trainer: Trainer
    saver: RunSaver
    watchdog: Watchdog
    log: Log
    batches: RunBatches | None
    start: int
    evaluator: Evaluator | None = None


def equipped(
    job: Job, plan: RunPlan, mesh: Mesh, hardware: Hardware, layout: Iterable[str]
) -> tuple[Mesh, Watchdog, Log, Callable[[], float]]:
    """Set up guards, watchdog, recorder and log of a run; return mesh, watchdog, log and clock.

    The log begins with the header and with the lines of `layout`, which describe how the model is
    distributed over the ranks.
    """
    from hpc3d.training.trace_setup import CLOCKS, recorded
    from hpc3d.training.watchdog import Watchdog

    config = plan.config
    mesh = guarded(mesh, config.guard)
    watchdog = Watchdog(job, mesh, plan.folder, config.run.watchdog_s, hardware.homes)
    mesh = recorded(job, mesh, config, plan.folder, hardware.transport, plan.git, plan.texts)
    if job.rank == 0 and (file := os.environ.get(FOLDER_FILE)):
        Path(file).write_bytes(os.fsencode(plan.folder))
    log = Log(plan.folder / "train.log", job.rank == 0, "a" if plan.resumed else "w")
    log.header(config, mesh, job, hardware, layout)
    for line in plan.changes:
        log.say(f"resume: {line}", "yellow")
    return mesh, watchdog, log, CLOCKS[config.trace.clock][1]


def trained(job: Job, plan: RunPlan, run: RunningJob, stop: Stop) -> None:
    """Run the training steps. Raises JobExit if a guard or a stop request ends the run early.

    NumPy's warnings about overflow and NaN are silenced, because the log and the guards report
    values that are not finite.
    """
    with closing(run.log), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NOT_FINITE, RuntimeWarning)
        others = OtherProcesses(job)
        try:
            done = _steps(job, plan, run, stop)
        except GuardError as wrong:
            _give_up(job, plan, run, wrong)
        share = others.share()
        if job.rank == 0 and share is not None:
            note_environment(plan.folder, other_cpu_share=share)
        _end(job, plan, run, done)
    if done < plan.config.train.steps:
        raise JobExit(STOPPED if run.saver.saved == done else FAILED)


def _steps(job: Job, plan: RunPlan, run: RunningJob, stop: Stop) -> int:
    """Run steps until the end or a stop request; return the number of completed steps.

    The first step may take minutes on many ranks or a busy machine, so its progress is shown.
    """
    config, trainer, log = plan.config, run.trainer, run.log
    log.record(run.start, config)
    starting: AbstractContextManager[None] = job.progress(StepPosition(trainer.mesh.trace, config))
    replicas = ReplicaCheck(trainer, config.guard.replicas_every)
    spikes = LossSpikes(config.guard.loss_spike_sigma)
    for number in range(run.start, config.train.steps):
        run.watchdog.step(number)
        if number % config.trace.sync_every == 0:
            trainer.mesh.trace.synchronize()
        with starting:
            step = trainer.step(number, stop.request)
        starting = nullcontext()
        log.step(step, config.train.steps)
        if line := spikes.see(step.loss):
            log.say(line, "yellow")
        replicas.after(number)
        stopping = bool(step.stop_request) and number + 1 < config.train.steps
        run.saver.after(number, best=not stopping and _evaluate(run, number))
        if stopping:
            _stop_early(plan, run, step)
            return number + 1
    if spikes.count:
        log.say(f"{spikes.count} loss spikes in total", "yellow")
    return config.train.steps


class StepPosition:
    """Position of rank 0 in a training step; its text is the current position."""

    def __init__(self, trace: MeshRecorder, config: Config) -> None:
        self.trace, self.config = trace, config

    def __str__(self) -> str:
        trace, parts = self.trace, [f"step {self.trace.step}: {self.trace.phase}"]
        if (number := trace.microbatch) >= 0:
            parts += [f"microbatch {number + 1} of {self.config.parallel.microbatches}"]
        if (layer := trace.layer) >= 0:
            parts += [f"layer {layer + 1} of {self.config.model.layers}"]
        return ", ".join(parts).replace("_", " ")


def _evaluate(run: RunningJob, number: int) -> bool:
    """Evaluate after step `number` if due; return True if the loss is the lowest so far."""
    if not run.evaluator or not (found := run.evaluator.after(number)):
        return False
    best = run.evaluator.best
    is_best = best is not None and best.step == number + 1
    run.log.evaluation(found, is_best)
    return is_best


def _stop_early(plan: RunPlan, run: RunningJob, step: Step) -> None:
    """Save a checkpoint if possible, and log why the run stops."""
    done = f"{step.number + 1:,} of {counted(plan.config.train.steps, 'step')}"
    run.log.say(f"{STOPPED_AFTER}{done}: {reason(step.stop_request)}", "yellow")
    saved = run.saver.stop(step.number)
    run.saver.wait()
    run.log.say(
        f"saved; resume with --resume {plan.folder}"
        if saved
        else "this step is not saved: the schedule keeps microbatches in flight between steps"
    )


def _end(job: Job, plan: RunPlan, run: RunningJob, done: int) -> None:
    """Finish a run: wait for pending checkpoints, and merge the traces of all ranks."""
    run.watchdog.stop()  # writing the last checkpoint may exceed the watchdog's limit
    run.saver.wait()
    run.trainer.mesh.trace.synchronize()
    if run.batches is not None:
        position = {"step": done, **run.batches.position(done)}
        write_text(plan.folder / "position.json", json.dumps(position) + "\n")
        if len(epochs := run.batches.epochs(done)) > 1:
            for path, number in zip(plan.config.data.paths(), epochs, strict=True):
                run.log.say(f"text: {path}; {number:.3g} epochs")
    launch.finish(job)
    job.barrier()
    if job.rank == 0 and plan.config.trace.enabled:
        from hpc3d.trace.merge import merge

        merge(plan.folder)
    if plan.config.parallel.offload and done > run.start:
        run.log.copies(store_of(run.trainer.mesh.pool), done - run.start)
    if plan.resumed and not run.saver.saved:
        run.log.say(
            "the steps of this run were not saved: the schedule keeps microbatches in flight "
            "between steps",
            "yellow",
        )
    run.log.end_metrics()
    if done == plan.config.train.steps:
        for line in _next_commands(plan, job.size):
            run.log.say(line)
    run.log.say(f"{KEPT}{plan.folder}", "green")
    job.barrier()


def _next_commands(plan: RunPlan, ranks: int) -> list[str]:
    """Return log lines with the two commands that are most useful after a completed run."""
    config, folder = plan.config, shlex.quote(str(plan.folder))
    commands = [f"report {folder}"] if config.trace.enabled else []
    if not config.torch.factory:
        if _has_checkpoint(plan.folder):
            causal = family_of(config.model).causal
            commands += [
                f"generate {folder} --prompt TEXT" if causal else f"evaluate {folder} --data TEXT"
            ]
        commands += [f"plan {folder}/config.toml --ranks {ranks}"]
    commands += [f"watch {folder}"]
    return [f"next: python -m hpc3d.{command}" for command in commands[:2]]


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-????????"))


def _give_up(job: Job, plan: RunPlan, run: RunningJob, wrong: GuardError) -> NoReturn:
    """Report the findings of the guard once, and end the job on all ranks."""
    run.watchdog.stop()
    run.saver.wait()
    for line in lines(wrong, job.gather(wrong.found)):
        run.log.warn(line)
    saved = _has_checkpoint(plan.folder)
    run.log.warn(
        f"resume from the last checkpoint with --resume {plan.folder}"
        if saved
        else "no checkpoint was saved; set checkpoint.every and restart"
    )
    launch.finish(job)
    job.barrier()
    raise JobExit(wrong.code)
