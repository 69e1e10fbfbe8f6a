"""Save checkpoints of a run periodically."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.checkpoints.sharded import Snapshot, complete, named, write_shard
from hpc3d.config.load import to_toml
from hpc3d.console.small_files import naming, sync

if TYPE_CHECKING:
    from hpc3d.config.input_file import CheckpointConfig
    from hpc3d.runtime.job import Job
    from hpc3d.training.evaluator import Evaluator
    from hpc3d.training.log import Log
    from hpc3d.training.run_loop import RunBatches, RunPlan
    from hpc3d.training.trainer import Trainer


class Saver:
    """Save a trainer's state periodically, as configured.

    `how` is the `[checkpoint]` section of the configuration. The state is saved every `every`
    steps and after the last step; `every` = 0 disables both. A `resumed` run always saves its last
    step, unless its schedule is asynchronous. The newest `keep` checkpoints are kept. With
    `keep_best`, the state is also saved after each evaluation that yields the lowest loss so far,
    and the best checkpoint is kept in addition.

    Training continues as soon as the rank's shard is copied. A thread writes the copy to disk, and
    rank 0's thread completes the checkpoint. `header(done)` returns the manifest entries after
    `done` steps, and `say(line)` logs each checkpoint on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        how: CheckpointConfig,
        header: Callable[[int], dict[str, Any]],
        say: Callable[[str], object],
        resumed: bool = False,
    ) -> None:
        self.parent, self.trainer, self.header = Path(folder) / "checkpoints", trainer, header
        self.how, self.say, self.thread, self.saved = how, say, None, 0
        self.resumed = resumed and not trainer.feed.asynchronous
        self.report = ""  # log line set by the writer thread; `wait` logs it
        self.exposed = 0.0  # seconds for which the current save blocked training

    def after(self, number: int, best: bool = False) -> None:
        """Save the state after step `number` if a checkpoint is due.

        `best` is True if the evaluation after this step is the best so far.
        """
        if self.thread and not self.thread.is_alive():
            self.wait()
        every, done = self.how.every, number + 1
        last = done == self.trainer.config.train.steps and (every or self.resumed)
        if last or (every and done % every == 0) or (best and self.how.keep_best):
            self.save(done)

    def stop(self, number: int) -> bool:
        """Save the state after step `number`, unless it is saved already.

        Returns False if the pipeline schedule is asynchronous. In this case, passes are still in
        flight at the end of a step, and a checkpoint cannot store them.
        """
        if self.trainer.feed.asynchronous:
            return False
        if self.saved != number + 1:
            self.save(number + 1)
        return True

    def save(self, done: int) -> None:
        """Wait for the previous save, then save the state after `done` steps."""
        self.wait()
        trainer, self.saved, begin = self.trainer, done, time.monotonic()
        agreed = trainer.outer is None or trainer.outer.is_agreed(done - 1)
        if trainer.outer:
            trainer.outer.complete()
        with trainer.mesh.trace.span("snapshot", "none"):
            snapshot = Snapshot(trainer.parameters, trainer.optimizer, agreed)
        self.exposed = time.monotonic() - begin
        header = self.header(done) | {"step": done, "updates": trainer.optimizer.steps}
        header["loss_scale"] = trainer.scaling.state()
        self.thread = threading.Thread(target=self.write, args=(snapshot, header, begin))
        self.thread.start()

    def write(self, snapshot: Snapshot, header: Mapping[str, Any], begin: float) -> None:
        mesh = self.trainer.mesh
        final = self.parent / named(header["step"])
        folder = final.with_suffix(".tmp")
        with naming(self.parent):
            folder.mkdir(parents=True, exist_ok=True)
            write_shard(folder, mesh.rank, snapshot)
            if mesh.rank:
                return
            sync(self.parent.parent)
            best = header.get("best") if self.how.keep_best else None
            spared = named(best["step"]) if best else None
            damage = complete(folder, mesh.ranks, header, self.how.keep, spared)
            size = sum(path.stat().st_size for path in final.iterdir())
            seconds = time.monotonic() - begin
            self.report = (
                damage or f"checkpoint {final.name}: {size / 1e6:.1f} MB in {seconds:.2f} s"
            )

    def wait(self) -> None:
        """Wait until the pending save is on disk."""
        if not self.thread:
            return
        begin = time.monotonic()
        with self.trainer.mesh.trace.span("checkpoint", "none"):
            self.thread.join()
        self.exposed += time.monotonic() - begin
        if self.report:
            self.say(f"{self.report}; training waited {self.exposed:.2f} s")
        self.thread, self.report = None, ""


def saver_of(
    job: Job,
    plan: RunPlan,
    trainer: Trainer,
    batches: RunBatches | None,
    log: Log,
    evaluator: Evaluator | None = None,
) -> Saver:
    """Create the saver of a run, and log the estimated cost of its checkpoints, if any."""
    how = plan.config.checkpoint
    if how.every or how.keep_best:
        from hpc3d.checkpoints.cost import forecast

        for line in forecast(job, plan.folder, trainer, how.keep + how.keep_best):
            log.say(line)

    def header(done):
        position = batches.position(done) if batches else None
        header = {"run_id": plan.folder.name, "config": to_toml(plan.config)}
        if evaluator and evaluator.best:
            header["best"] = evaluator.best._asdict()
        texts = {"texts": plan.texts} if plan.texts else {}
        return header | {"position": position} | texts | trainer.manifest()

    return Saver(plan.folder, trainer, how, header, log.say, bool(plan.resumed))
