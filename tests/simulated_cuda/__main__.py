"""Run a module with CuPy on simulated CUDA: python -m tests.simulated_cuda MODULE [WORDS]

SIMULATED_DEVICES is the number of devices (1). At the end, each rank writes the names of its
posted operations and their counts to the file SIMULATED_POSTED, as JSON; the last one remains.
"""

import atexit
import json
import os
import runpy
import sys
import time
from functools import partial
from pathlib import Path

from tests.simulated_cuda import capsules, device, kernels

WAIT = 0.0005  # seconds: a host that spins takes the core of the simulated device
WHEEL = Path(sys.prefix) / "cupy"  # where `make test-slow` puts CuPy, so that others do not see it


def install():
    """Make CuPy load the simulated CUDA; must be called before its first import."""
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
    from tests.simulated_cuda import nccl

    nccl.install()
    from hpc3d.cuda import cublaslt_library
    from tests.simulated_cuda.products import SimulatedLt

    cublaslt_library.load = SimulatedLt
    os.sched_yield = partial(time.sleep, WAIT)


def keep_counts(path):
    own = Path(f"{path}.{os.getpid()}")  # ranks may end at once
    own.write_text(json.dumps(device.posted))
    own.replace(path)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    install()
    if "SIMULATED_POSTED" in os.environ:
        atexit.register(keep_counts, os.environ["SIMULATED_POSTED"])
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
