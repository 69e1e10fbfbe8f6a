"""A part of the GPU check with all kinds of faults: python -m tests.gpu.planted PART FILE."""

import ctypes
import os
import sys
import time
from pathlib import Path

from tests.gpu import routed
from tests.gpu.child import made
from tests.gpu.fake import Fake
from tests.gpu.guards import guarded
from tests.gpu.notes import Notes, Skip
from tests.gpu.sizes import SMALL, Bench


def right(notes):
    notes.fact("figure", 1.5)
    notes.fact("process", os.getpid())
    notes.same("numbers", [1.0, 2.0], [1.0, 2.0], 0)


def wrong(notes):
    notes.same("numbers", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]], 0.1)
    notes.check("goes on behind it", True)


def raises(notes):
    raise RuntimeError("cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED")


def dies(notes):
    os._exit(9)


def crashes(notes):
    ctypes.string_at(0)


def hangs(notes):
    time.sleep(60)


def skips(notes):
    raise Skip("nothing to do here")


def misroutes(notes):
    """Swap the slots of the first and the last token."""
    device = Fake()
    right = guarded(device, device.launch())

    def wrong(name, rows, columns, /, **given):
        right(name, rows, columns, **given)
        if name == "slots_of":
            given["slots"][[0, -1]] = given["slots"][[-1, 0]]

    routed.slots(Bench(wrong, "float32", SMALL), notes)


def sleeps(notes):
    time.sleep(1)


class Lost:
    """Device that stops responding after the second case of a process."""

    def __init__(self):
        self.asked = 0

    def alive(self):
        self.asked += 1
        return self.asked < 2


PARTS = {
    "trouble": (None, (right, wrong, raises, dies, crashes, hangs, skips)),
    "misrouted": (None, (misroutes,)),
    "slow": (None, (right, sleeps, sleeps, sleeps)),
    "lost": (Lost, (right, raises, right)),
    "broken": (None, None),
}


def main(part, path):
    device, functions = PARTS[part]
    numbered = enumerate((*functions, right))
    cases = [(f"{number} {function.__name__}", function) for number, function in numbered]
    return made(Notes(Path(path)), device and device(), cases)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
