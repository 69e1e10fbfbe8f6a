"""Checkpoints of a run as it goes, and the one that it goes on from."""

import shutil
import threading
from pathlib import Path

from hpc3d.training.checkpoint import (
    FORMAT,
    VERSION,
    Checkpoint,
    Snapshot,
    complete,
    restore,
    steps_of,
    write_shard,
)


class Saver:
    """Saves the state of a trainer as `how` says: after every `every`-th step and the last one
    (0: never), of which it keeps `keep`.

    The rank goes on when its share is copied; a thread writes it, and that of rank 0 finishes the
    checkpoint.  `header(done)` is plain data for the manifest.
    """

    def __init__(self, folder, trainer, how, header):
        self.parent, self.trainer, self.header = Path(folder) / "checkpoints", trainer, header
        self.how, self.thread, self.saved = how, None, 0

    def after(self, number):
        """Save if it is time to, after step `number`."""
        done, last = number + 1, self.trainer.config.train.steps
        if self.how.every and (done % self.how.every == 0 or done == last):
            self.save(done)

    def stop(self, number):
        """Save after step `number` if that has not been done; whether there is anything to save.

        An asynchronous schedule has passes in flight that no checkpoint holds.
        """
        if self.trainer.feed.asynchronous:
            return False
        if self.saved != number + 1:
            self.save(number + 1)
        return True

    def save(self, done):
        """Save the state after `done` steps; waits for the one before to be on disk."""
        self.wait()
        trainer, self.saved = self.trainer, done
        with trainer.mesh.trace.span("snapshot", "none"):
            snapshot = Snapshot(trainer.parameters, trainer.optimizer)
        header = self.header(done) | {
            "format": FORMAT,
            "version": VERSION,
            "step": done,
            "updates": trainer.optimizer.steps,
        }
        self.thread = threading.Thread(target=self.write, args=(snapshot, header))
        self.thread.start()

    def write(self, snapshot, header):
        mesh = self.trainer.mesh
        folder = self.parent / f"step-{header['step']:08d}.tmp"
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(folder, mesh.rank, snapshot)
        if mesh.rank == 0:
            complete(folder, mesh.ranks, header, self.how.keep)

    def wait(self):
        """Until what was begun is on disk."""
        if self.thread:
            with self.trainer.mesh.trace.span("checkpoint", "none"):
                self.thread.join()
            self.thread = None


def clear(run_dir):
    """Remove what a killed run had begun to save."""
    for folder in (Path(run_dir) / "checkpoints").glob("step-????????.tmp"):
        shutil.rmtree(folder)


def newest(run_dir, share):
    """The newest whole Checkpoint of a run, and a line for each newer one that is not.

    `share(checkpoint)` checks the files, perhaps with other ranks, and returns what is wrong.
    ValueError if there is none.
    """
    wrong = []
    for folder in steps_of(Path(run_dir) / "checkpoints"):
        try:
            opened = Checkpoint(folder)
        except ValueError as error:
            wrong.append(str(error))
            continue
        problems = share(opened)
        if not problems:
            return opened, wrong
        wrong += problems
    raise ValueError("\n".join([*wrong, f"{run_dir}: no checkpoint to resume from; train anew"]))


def resume(opened, trainer):
    """Give a trainer the state of a checkpoint; the number of steps that are done."""
    restore(opened, trainer.parameters, trainer.optimizer)
    trainer.optimizer.steps = opened.header["updates"]
    return opened.header["step"]
