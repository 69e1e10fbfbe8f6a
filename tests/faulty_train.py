"""`faulty_train.py FAULT [train's own words]`: training in which one rank fails in step 2."""

import functools
import os
import signal
import sys
import time

from hpc3d import train
from hpc3d.trace import recorder
from hpc3d.training import loop

FAULTS = {
    "raise": lambda: {}["a message of one rank"],
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "end the launcher": lambda: os.kill(os.getppid(), signal.SIGTERM),
}


def main(fault, *words):
    step = loop.Trainer.step

    def faulty(self, number):
        if number == 2 and self.mesh.rank == self.mesh.ranks - 1:
            print(f"fault at {time.time()}", flush=True)
            FAULTS[fault]()
        return step(self, number)

    loop.Trainer.step = faulty
    if fault == "kill":  # nothing can be written then: have a segment of every step
        recorder.Recorder = functools.partial(recorder.Recorder, every_s=0)
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
