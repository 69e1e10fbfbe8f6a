"""Training in which one rank fails in step 2: `faulty_train.py FAULT FILE [train's own words]`.

The time of the fault is written to FILE.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

from hpc3d import train
from hpc3d.trace import recorder
from hpc3d.training import loop

FAULTS = {
    "raise": lambda: {}["a message of one rank"],
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "end the launcher": lambda: os.kill(os.getppid(), signal.SIGTERM),
}


def main(fault, file, *words):
    step = loop.Trainer.step

    def faulty(self, number):
        if number == 2 and self.mesh.rank == self.mesh.ranks - 1:
            Path(file).write_text(str(time.time()))
            FAULTS[fault]()
        return step(self, number)

    loop.Trainer.step = faulty
    if fault not in (
        "raise",
        "exit",
    ):  # the launcher may leave no time: have segments of all steps
        recorder.Recorder = functools.partial(recorder.Recorder, every_s=0)
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
