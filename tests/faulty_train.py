"""Training in which a rank fails in step 2: `faulty_train.py FAULT RANK FILE [train options]`.

The time of the fault is written to FILE.
"""

import errno
import functools
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from hpc3d import train
from hpc3d.checkpoints import saver
from hpc3d.comm.communicator import Pending
from hpc3d.trace import recorder
from hpc3d.training import trainer as loop

WAITS = 30  # of the step, before the one in which a rank fails


def fail(error):
    """Return a function that raises `error` for any arguments."""

    def act(*_):
        raise error

    return act


def signaled(number, process=os.getpid):
    return lambda: os.kill(process(), number)


def for_ever():
    while True:
        pass


def in_a_call(act):
    """Act while the rank waits for a block, in the middle of the step."""

    def arm(trainer):
        wait, waits = Pending.wait, itertools.count()

        def faulty(self):
            if next(waits) == WAITS:
                act()
            return wait(self)

        Pending.wait = faulty

    return arm


def in_the_reader(act):
    def arm(trainer):
        trainer.feed.batches.batch = act

    return arm


def in_the_writer(act):
    def arm(trainer):
        saver.write_shard = act

    return arm


def first_rank():
    """Return the process id of rank 0."""
    (path,) = Path(sys.argv[sys.argv.index("--run.out") + 1]).glob("*/environment.json")
    return json.loads(path.read_text())["ranks"][0]["pid"]


def desert():
    """Terminate rank 0, which then waits for this rank."""
    os.kill(first_rank(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "raise": (in_a_call, fail(KeyError("a message of one rank"))),
    "memory": (in_a_call, fail(MemoryError("a message of one rank"))),
    "exit": (in_a_call, fail(SystemExit(7))),
    "reader": (in_the_reader, fail(RuntimeError("a message of the reader"))),
    "writer": (in_the_writer, fail(RuntimeError("a message of the writer"))),
    "full disk": (in_the_writer, fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))),
    "kill": (in_a_call, signaled(signal.SIGKILL)),
    "stop": (in_a_call, signaled(signal.SIGSTOP)),
    "desert": (in_a_call, desert),
    "for ever": (in_a_call, for_ever),
    "end the launcher": (in_a_call, signaled(signal.SIGTERM, os.getppid)),
}
SUDDEN = ("kill", "stop", "desert", "end the launcher")


def main(fault, rank, file, *words):
    where, act = FAULTS[fault]

    def noted(*arguments):
        Path(file).write_text(str(time.time()))
        act(*arguments)

    def faulty(self, number, stop_request):
        if number == 2 and self.mesh.rank == int(rank):
            where(noted)(self)
        return step(self, number, stop_request)

    step, loop.Trainer.step = loop.Trainer.step, faulty
    if fault in SUDDEN:  # the launcher may leave no time: have segments of all steps
        recorder.Recorder = functools.partial(recorder.Recorder, every_s=0)
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
