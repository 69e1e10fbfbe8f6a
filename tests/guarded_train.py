"""Training in which a number of the last rank becomes wrong in step 2:
`guarded_train.py FAULT FILE [train options]`.

The time of the fault is written to FILE.
"""

import sys
import time
from pathlib import Path

import numpy as np

from hpc3d import train
from hpc3d.runtime import environment

environment.set_environment()

from hpc3d.comm.abft.checker import AbftChecker  # noqa: E402
from hpc3d.comm.all_pairs import AllPairs  # noqa: E402
from hpc3d.training import trainer as loop  # noqa: E402

STEP = 2


def flip(block, place):
    """Flip the highest bit of the exponent of an element, in place."""
    words = block.reshape(-1).view(f"u{block.itemsize}")
    words[place % words.size] ^= words.dtype.type(1 << (8 * block.itemsize - 2))


def product(trainer, hit):
    """Flip a bit in the result of a product."""

    def check(self, a, b, c):
        hit(lambda: flip(c, c.size // 2))
        plain(self, a, b, c)

    plain, AbftChecker.product = AbftChecker.product, check


def received(trainer, hit):
    """Flip a bit in a received block."""

    def _all_gather(self, block):
        pending = plain(self, block)
        return pending.then(lambda whole: hit(lambda: flip(whole, 0)) or whole)

    plain, AllPairs._all_gather = AllPairs._all_gather, _all_gather


def replica(trainer, hit):
    """Flip a bit in a replicated parameter after the step."""
    end = trainer.mesh.guard.end

    def late():
        (item,) = (item for item in trainer.parameters if item.name == "layers.1.norm2.gamma")
        hit(lambda: flip(item.value, 3))
        end()

    trainer.mesh.guard.end = late


def weight(trainer, hit):
    """Put a NaN into a matrix."""
    (item,) = (item for item in trainer.parameters if item.name == "layers.1.up.weight")
    hit(lambda: item.value.__setitem__((0, 0), np.nan))


def gradient(trainer, hit):
    """Put a NaN into the gradient of a matrix."""
    (item,) = (item for item in trainer.parameters if item.name == "layers.0.qkv.weight")
    wait = trainer.buckets.wait

    def late():
        wait()
        hit(lambda: item.grad.__setitem__((0, 0), np.nan))

    trainer.buckets.wait = late


FAULTS = {each.__name__: each for each in (product, received, replica, weight, gradient)}


def main(fault, file, *words):
    plain = loop.Trainer.step

    def hit(act):
        """Write the time to the file and act, unless this was done before."""
        if not Path(file).exists():
            Path(file).write_text(str(time.time()))
            act()

    def step(self, number, *arguments):
        if number == STEP and self.mesh.rank == self.mesh.ranks - 1:
            FAULTS[fault](self, hit)
        return plain(self, number, *arguments)

    loop.Trainer.step = step
    return train.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
