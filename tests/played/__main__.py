"""Runs a module with CuPy on the played CUDA: python -m tests.played MODULE [WORDS]

PLAYED_DEVICES is the number of devices (1); PLAYED_POSTED names a file that is given, at the end,
what was posted on streams, as JSON.
"""

import atexit
import json
import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path

from tests.played import capsules, device, kernels

WAIT = 0.0005  # seconds: a host that spins takes the core of the played device
WHEEL = Path(sys.prefix) / "cupy"  # where `make test-slow` puts CuPy, so that others do not see it


def play():
    """Let CuPy find the played CUDA.  Before its first import."""
    if WHEEL.exists():
        sys.path.append(str(WHEEL))
    os.environ |= {
        "CUPY_CACHE_DIR": str(kernels.FOLDER / "cupy"),
        "CUPY_ACCELERATORS": "",  # CUB has a CUDA of its own within it
    }
    from cupy_backends.cuda.api import driver, runtime

    capsules.replace(runtime, device.RUNTIME)
    capsules.replace(driver, device.DRIVER)
    from cupy_backends.cuda.libs import nvrtc

    kernels.watch(nvrtc)
    from tests.played import nccl

    nccl.play()
    from hpc3d.cuda import cublaslt_library
    from tests.played.products import PlayedLt

    cublaslt_library.load = PlayedLt
    os.sched_yield = partial(time.sleep, WAIT)


def keep_counts(path):
    Path(path).write_text(json.dumps(device.posted))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    play()
    if "PLAYED_POSTED" in os.environ:
        atexit.register(keep_counts, os.environ["PLAYED_POSTED"])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
