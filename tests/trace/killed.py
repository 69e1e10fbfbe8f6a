"""Training in which one rank is killed in step 3: `killed.py WHERE RANK [train options]`.

WHERE is "in a step" or "while it writes": the segment of that step is on disk, but has not been
renamed to its final name yet.
"""

import functools
import os
import signal
import sys

from hpc3d import train
from hpc3d.trace import recorder
from hpc3d.training import trainer

STEP = 3


def main(where, rank, *words):
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, number, *stop_request, original=trainer.Trainer.step):
        if number == STEP and self.mesh.rank == int(rank):
            if where == "in a step":
                self.engine.update = kill
            else:
                os.replace = lambda *_: kill()
        return original(self, number, *stop_request)

    trainer.Trainer.step = step
    recorder.Recorder = functools.partial(recorder.Recorder, every_s=0)  # a segment a step
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
