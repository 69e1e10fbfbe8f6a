"""CUDA devices as CuPy finds them, and whether MPI may be given their memory.

No device pointer goes to an MPI that does not say that it takes them, for that ends the process;
one that says so is tried in a process of its own: `python -m hpc3d.cluster.devices`.
"""

import ctypes
import os
import sys
from importlib.util import find_spec

from hpc3d.cluster.health import FAIL, OK, WARN, Finding, installed, outcome

DRIVER = "/proc/driver/nvidia/version"
EXTRAS = "python -m pip install 'hpc3d[gpu-cuda12]' (or gpu-cuda13, by the driver)"
WHEELS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
TAKEN, STAGED, WRONG = "taken", "staged", "wrong"


def devices():
    """The devices of this process, with driver, runtime and NCCL; a note where CuPy is not."""
    if find_spec("cupy") is None:
        here = "an NVIDIA driver is here, but not CuPy" if os.path.exists(DRIVER) else "no CuPy"
        yield Finding(OK, "GPU", f"{here}, so no GPU backend: {EXTRAS}")
        return
    wheels = [name for name in WHEELS if installed(name)]
    if len(wheels) > 1:
        remedy = f"python -m pip uninstall {' '.join(wheels)}, then install one of them"
        yield Finding(FAIL, "CuPy", f"{' and '.join(wheels)} overwrite each other", remedy)
    import cupy

    if not cupy.cuda.is_available():
        text = f"CuPy {cupy.__version__} finds no device"
        yield Finding(
            WARN, "GPU", text, "nvidia-smi tells why; or ask the job for --gpus-per-node"
        )
        return
    yield from versions(cupy.cuda.runtime)
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        yield described(number, cupy.cuda.runtime.getDeviceProperties(number))
    yield from nccl()


def present():
    """Whether CuPy is here and finds a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    return cupy.cuda.is_available()


def versions(runtime):
    """CUDA's driver must not be older than its runtime by a major version."""
    driver, library = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    text = f"driver for {dotted(driver)}, runtime {dotted(library)}"
    if driver // 1000 < library // 1000:
        remedy = f"a newer driver, or the wheel cupy-cuda{driver // 1000}x"
        yield Finding(FAIL, "CUDA", text, remedy)
    else:
        yield Finding(OK, "CUDA", text)


def dotted(version):
    """12090 is CUDA 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def described(number, properties):
    name = properties["name"].decode()
    capability = f"{properties['major']}.{properties['minor']}"
    memory = properties["totalGlobalMem"] / 1e9
    text = f"{name}, compute capability {capability}, {memory:.0f} GB"
    return Finding(OK, f"device {number}", text)


def nccl():
    """NCCL and the type bfloat16, which CuPy's wheels do not bring."""
    from cupy.cuda import nccl as library

    if getattr(library, "available", False):
        whole = library.get_version()
        found = f"{whole // 10000}.{whole // 100 % 100}.{whole % 100}"
        yield Finding(OK, "NCCL", found)
    else:
        yield Finding(WARN, "NCCL", "not installed: ranks use MPI", EXTRAS)
    if find_spec("ml_dtypes") is None:
        yield Finding(WARN, "ml_dtypes", "not installed: no bfloat16", EXTRAS)


def device_map(job):
    """Which device each rank of a node takes: its number there, modulo the devices."""
    place, taken = job.place(), None
    if present():
        import cupy

        taken = place["local_rank"] % cupy.cuda.runtime.getDeviceCount()
    hosts, devices = job.gather(place["host"]), job.gather(taken)
    if devices == [None] * job.size:
        return
    pairs = list(zip(hosts, devices, strict=True))
    listed = ", ".join(f"{rank}:{device}" for rank, device in enumerate(devices))
    if None in devices:
        remedy = "ask for --gpus-per-node; or train.backend = numpy"
        yield Finding(WARN, "devices of ranks", f"{listed}: some have none", remedy)
    elif len(set(pairs)) < len(pairs):
        remedy = "as many ranks as devices on each node; --gpus-per-node, not --gpus-per-task"
        yield Finding(WARN, "devices of ranks", f"{listed}: some share one", remedy)
    else:
        yield Finding(OK, "devices of ranks", listed)


def aware(mpirun, seconds, environment):
    """Whether MPI takes device memory: what it says, and two ranks that try it if it says so."""
    command = [mpirun, "-np", "2", sys.executable, "-m", "hpc3d.cluster.devices"]
    code, printed = outcome(command, seconds, **environment)
    said = set(printed.split()) & {TAKEN, STAGED, WRONG}
    if code == 0 and said == {STAGED}:
        yield Finding(OK, "CUDA-aware MPI", "no: messages go through the host's memory")
    elif code == 0 and said == {TAKEN}:
        yield Finding(OK, "CUDA-aware MPI", "yes: a sum and a message came out right")
    else:
        what = {0: "gives wrong results", None: "hangs"}.get(code, f"ends with exit code {code}")
        remedy = "let messages go through the host's memory, or repair MPI (UCX with CUDA)"
        yield Finding(FAIL, "CUDA-aware MPI", f"MPI says yes, but {what}", remedy)


def says_yes(path):
    """Whether the library at `path`, which is started, says that it takes device memory."""
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    return bool(query and query())


def attempt():
    """One of two ranks: a sum and a message with a known result, from device memory."""
    from mpi4py import MPI

    from hpc3d.cluster.library import library_file

    comm = MPI.COMM_WORLD
    if not says_yes(library_file()):
        return STAGED
    import cupy

    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    mine = cupy.arange(1000, dtype="float64") + comm.rank
    total, came = cupy.empty_like(mine), cupy.empty_like(mine)
    cupy.cuda.get_current_stream().synchronize()
    comm.Allreduce(mine, total)
    comm.Sendrecv(mine, (comm.rank + 1) % comm.size, recvbuf=came)
    right = (total == 2 * cupy.arange(1000) + 1).all(), (came - mine == 1 - 2 * comm.rank).all()
    return TAKEN if all(map(bool, right)) else WRONG


if __name__ == "__main__":
    print(attempt(), flush=True)
