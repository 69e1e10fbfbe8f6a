"""Training that records every loss with all bits: `recorded_train.py FILE [words]`."""

import sys
from pathlib import Path

from hpc3d import train
from hpc3d.training import trainer


def main(file, *words):
    step = trainer.Trainer.step

    def recorded(self, number, *more):
        done = step(self, number, *more)
        if self.mesh.rank == 0:
            with Path(file).open("ab", buffering=0) as opened:
                opened.write(f"{number} {done.loss!r}\n".encode())
        return done

    trainer.Trainer.step = recorded
    return train.main([*words])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
