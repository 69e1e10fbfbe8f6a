"""Find CUDA devices with CuPy, and test MPI's support for device memory.

A device pointer is passed only to an MPI that reports CUDA support, because other MPI libraries
crash the process. The reported support is tested in a separate process: `python -m
hpc3d.comm.cuda_aware_probe`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

from hpc3d.runtime import mpi_library as library
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding
from hpc3d.runtime.mpi_launcher import launch_settings
from hpc3d.runtime.probe import installed, outcome

if TYPE_CHECKING:
    from hpc3d.comm.cuda_aware_mpi import CudaAwareMpi
    from hpc3d.runtime.job import Job

_DRIVER = "/proc/driver/nvidia/version"
EXTRAS = "python -m pip install 'hpc3d[gpu-cuda12]' (or gpu-cuda13, depending on the driver)"
_WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
TAKEN, STAGED, WRONG = "taken", "staged", "wrong"
# Prefixes of environment variables set by MPI launchers, except that variables with a prefix in
# _KEPT are the user's own MPI settings.
_LAUNCHED = ("OMPI_", "PMI", "PRTE_LAUNCHED", "SLURM_")
_SIZES = 2, 1 << 18  # number of rows of the test blocks
_KEPT = ("OMPI_MCA_", "OMPI_ALLOW_", "PMIX_PREFIX", "PMIX_MCA_")


def devices() -> Iterator[Finding]:
    """Yield findings on the visible devices, CUDA and NCCL, or a note if CuPy is missing."""
    if find_spec("cupy") is None:
        here = "an NVIDIA driver is installed, but " if os.path.exists(_DRIVER) else ""
        yield Finding(OK, "GPU", f"{here}CuPy is missing; to use the GPU backend, run {EXTRAS}")
        return
    wheels = [name for name in _WHEELS if installed(name)]
    if len(wheels) > 1:
        remedy = f"python -m pip uninstall {' '.join(wheels)}, then install one of them"
        yield Finding(FAIL, "CuPy", f"{' and '.join(wheels)} overwrite each other", remedy)
    import cupy

    if not cupy.cuda.is_available():
        text = f"CuPy {cupy.__version__} finds no device"
        yield Finding(WARN, "GPU", text, "run nvidia-smi, or set --gpus-per-node in the Slurm job")
        return
    yield from _versions(cupy.cuda.runtime)
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        found = cupy.cuda.runtime.getDeviceProperties(number)
        capability = f"compute capability {found['major']}.{found['minor']}"
        text = f"{found['name'].decode()}, {capability}, {found['totalGlobalMem'] / 1e9:.0f} GB"
        yield Finding(OK, f"device {number}", text)
    yield from nccl()


def present() -> bool:
    """Return True if CuPy is installed and finds a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    return cupy.cuda.is_available()


def _versions(runtime: Any) -> Iterator[Finding]:
    """Yield a finding on the CUDA driver; its major version must not be below the runtime's."""
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    text = f"driver for {_dotted(driver)}, runtime {_dotted(needed)}"
    if driver // 1000 < needed // 1000:
        remedy = f"install a newer driver, or the wheel cupy-cuda{driver // 1000}x"
        yield Finding(FAIL, "CUDA", text, remedy)
    else:
        yield Finding(OK, "CUDA", text)


def _dotted(version: int) -> str:
    """Format a CUDA version number: 12090 becomes "12.9"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def nccl_version() -> int:
    """Return NCCL's version number, or 0 if NCCL is missing, without printing CuPy's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from cupy.cuda import nccl as library
        except ImportError:
            return 0
    return library.get_version() if getattr(library, "available", False) else 0


def release_of(whole: int) -> str:
    """Format an NCCL version number: 23203 becomes "2.32.3"."""
    return f"{whole // 10000}.{whole // 100 % 100}.{whole % 100}"


def nccl() -> Iterator[Finding]:
    """Yield a finding on NCCL, which CuPy's wheels do not include."""
    if found := nccl_version():
        yield Finding(OK, "NCCL", release_of(found))
    else:
        yield Finding(WARN, "NCCL", "not installed, so ranks use MPI", EXTRAS)


def device_map(job: Job) -> Iterator[Finding]:
    """Yield a finding that lists each rank's device.

    On a node with n devices, local rank i uses device i mod n.
    """
    location, taken = job.location(), None
    if present():
        import cupy

        taken = location["local_rank"] % cupy.cuda.runtime.getDeviceCount()
    hosts, devices = job.gather(location["host"]), job.gather(taken)
    if devices == [None] * job.size:
        return
    pairs = list(zip(hosts, devices, strict=True))
    listed = ", ".join(f"{rank}:{device}" for rank, device in enumerate(devices))
    if None in devices:
        remedy = "set --gpus-per-node in the Slurm job, or use train.backend = numpy"
        yield Finding(WARN, "devices of ranks", f"{listed}: some ranks have no device", remedy)
    elif len(set(pairs)) < len(pairs):
        remedy = "start one rank per device, with --gpus-per-node instead of --gpus-per-task"
        yield Finding(WARN, "devices of ranks", f"{listed}: some ranks share a device", remedy)
    else:
        yield Finding(OK, "devices of ranks", listed)


def missing(asked: str, dtype: str) -> str | None:
    """Return an error message for the first unmet requirement of train.backend = cupy, or `None`.

    `asked` is the value of mesh.transport, and `dtype` is the value of train.dtype.
    """
    what, remedy = next(_lacks(asked, dtype), (None, None))
    return what and f"train.backend = cupy: {what}; {remedy}, or use train.backend = numpy"


def _lacks(asked: str, dtype: str) -> Iterator[tuple[str, str]]:
    """Yield a pair (unmet requirement, fix) for each failed check. Use only the first pair: each
    check assumes that all earlier checks pass."""
    if find_spec("cupy") is None:
        yield "CuPy is not installed", f"run {EXTRAS}"
    from hpc3d.cuda.device import imported

    try:
        cupy = imported()
    except Exception as error:  # ImportError, or an error raised by a CUDA library
        reason = f"{error}".strip().partition("\n")[0]
        yield f"CuPy cannot be imported ({reason})", f"run {EXTRAS}"
    if int(cupy.__version__.partition(".")[0]) < 14:
        yield f"CuPy {cupy.__version__} is older than 14", f"run {EXTRAS}"
    runtime = cupy.cuda.runtime
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        yield "no NVIDIA driver is installed", "run on a machine with a GPU"
    if driver // 1000 < needed // 1000:
        text = f"the driver supports CUDA {_dotted(driver)}, but CuPy needs {_dotted(needed)}"
        yield text, f"install a newer driver, or the wheel cupy-cuda{driver // 1000}x"
    if not cupy.cuda.is_available():
        yield "CuPy finds no device", "run nvidia-smi, set --gpus-per-node in the Slurm job"
    major = runtime.getDeviceProperties(0)["major"]
    if dtype == "bfloat16" and major < 8:
        text = f"devices with compute capability {major} do not support bfloat16"
        yield text, "use train.dtype = float16"
    if asked == "nccl" and not nccl_version():
        yield "mesh.transport = nccl, but NCCL is not installed", f"run {EXTRAS}"


def aware(mpirun: str, seconds: float) -> Iterator[Finding]:
    """Yield a finding on CUDA-aware MPI; two ranks verify the support that MPI reports."""
    answer, problem = tried(mpirun, seconds)
    if answer == STAGED:
        yield Finding(OK, "CUDA-aware MPI", "not supported: messages go through host memory")
    elif answer == TAKEN:
        yield Finding(OK, "CUDA-aware MPI", "supported: reductions and messages are correct")
    else:
        remedy = "use mesh.transport = host-staged, or install an MPI whose UCX is built with CUDA"
        yield Finding(FAIL, "CUDA-aware MPI", f"MPI reports support, but {problem}", remedy)


def tried(mpirun: str, seconds: float) -> tuple[str, str]:
    """Test CUDA-aware MPI with two ranks; return the result and a description of the problem.

    The result is TAKEN (MPI transfers device memory correctly), STAGED (MPI reports no CUDA
    support, so messages must go through host memory) or WRONG (the test hangs, fails or gives
    wrong results). The ranks form a separate MPI job, even if this process is part of one.
    """
    launched = [
        name for name in os.environ if name.startswith(_LAUNCHED) and not name.startswith(_KEPT)
    ]
    forgotten = [word for name in launched for word in ("-u", name)]
    words = [mpirun, "-np", "2", sys.executable, "-m", "hpc3d.comm.cuda_aware_probe"]
    code, printed = outcome(["env", *forgotten, *words], seconds, **launch_settings())
    said = set(printed.split()) & {TAKEN, STAGED, WRONG}
    if code == 0 and said in ({TAKEN}, {STAGED}):
        return said.pop(), ""
    what = {0: "gives wrong results", None: "hangs"}.get(code, f"ends with exit code {code}")
    return WRONG, f"a test of two ranks {what}"


def says_yes(path: str | None) -> bool:
    """Return True if the initialized MPI library at `path` reports CUDA support."""
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    return bool(query and query())


def _attempt() -> str:
    """Test every CudaAwareMpi call between two ranks; return TAKEN, STAGED or WRONG."""
    from mpi4py import MPI

    if not says_yes(library.library_file()):
        return STAGED
    from hpc3d.comm.cuda_aware_mpi import CudaAwareMpi
    from hpc3d.cuda.device import DevicePool, bound

    comm = MPI.COMM_WORLD
    pool = DevicePool(bound(comm.rank))
    tested = CudaAwareMpi(comm, range(comm.size), pool)
    cases = product(_SIZES, ("float32", "float16"))
    return TAKEN if all(_right(tested, rows, dtype) for rows, dtype in cases) else WRONG


def _right(comm: CudaAwareMpi, rows: int, dtype: str) -> bool:
    import numpy as np

    values = np.arange(2 * rows).reshape(rows, 2) % 100
    ours = [(values + member).astype(dtype) for member in range(comm.size)]
    total, whole = ours[0] + ours[1], np.concatenate(ours)
    mine, other = comm.pool.bring(ours[comm.rank]), 1 - comm.rank
    sent, came = comm.send(mine, other), comm.recv((rows, 2), dtype, other)
    results = [
        (came, ours[other]),
        (sent, ours[comm.rank]),
        (comm.all_gather(mine), whole),
        (comm.all_reduce(mine), total),
        (comm.reduce_scatter(mine), np.split(total, 2)[comm.rank]),
        (comm.broadcast(mine if comm.rank else mine[:0], 1), ours[1]),
        (comm.reduce(mine, 0), total if comm.rank == 0 else total[:0]),
        (comm.all_to_all(mine), np.concatenate([np.split(b, 2)[comm.rank] for b in ours])),
    ]
    return all(
        np.array_equal(comm.device.download(found.wait()), wanted) for found, wanted in results
    )


if __name__ == "__main__":
    print(_attempt(), flush=True)
