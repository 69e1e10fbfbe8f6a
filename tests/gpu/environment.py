"""Hardware and software of this machine, and program modules that can be imported."""

import os
import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path

from tests.gpu.notes import Skip

PACKAGES = {
    *("cupy", "cupy-cuda12x", "cupy-cuda13x", "numpy", "ml-dtypes", "h5py", "mpi4py", "torch"),
    *("triton", "pydantic", "pytest", "pytest-timeout", "nvmath-python"),
}
VARIABLES = "CUDA", "NCCL", "CUPY", "LD_LIBRARY_PATH", "OMPI", "MPI4PY", "HPC3D", "PYTORCH"
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit"
MODULES = (
    *("arrays.pool", "cuda.device", "cuda.cublaslt", "comm.nccl", "comm.host_staged"),
    *("comm.cuda_aware_mpi", "comm.transport", "comm.cartesian", "cuda.launch_table"),
    *("cuda.kernel_loader", "cuda.gpu", "cuda.cudnn_attention", "training.trainer"),
    *("trace.device_recorder", "config.load"),
)


def cases(device, quick):
    yield "machine", machine
    yield "nvidia-smi", nvidia_smi
    yield "packages", packages
    yield "CuPy", cupy
    yield "CuPy's configuration", configuration
    yield "NCCL", nccl
    yield "cuDNN", cudnn
    yield "cuDNN's frontend", frontend
    yield "torch", torch
    yield "MPI", mpi
    for module in MODULES:
        yield f"import hpc3d.{module}", partial(imported, f"hpc3d.{module}")


def machine(notes):
    notes.fact("python", sys.version.split()[0])
    notes.fact("executable", sys.executable)
    notes.fact("system", platform.platform())
    notes.fact("cores", len(os.sched_getaffinity(0)))
    chosen = {key: text for key, text in os.environ.items() if key.startswith(VARIABLES)}
    notes.fact("variables", chosen)


def nvidia_smi(notes):
    if not shutil.which("nvidia-smi"):
        raise Skip("no nvidia-smi on PATH")
    for words in ([f"--query-gpu={QUERY}", "--format=csv,noheader"], []):
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=False
        )
        text = (done.stdout + done.stderr).strip()
        notes.fact(" ".join(["nvidia-smi", *words[:1]]), text)
        notes.check("exit code", done.returncode == 0, code=done.returncode)


def packages(notes):
    found = {d.name.lower().replace("_", "-"): d.version for d in distributions() if d.name}
    for name in sorted(found):
        if name in PACKAGES or name.startswith("nvidia-"):
            notes.fact(name, found[name])


def the(name):
    """Return a module; skip the case if it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        raise Skip(f"no {name}: {error}") from None


def cupy(notes):
    cupy = the("cupy")
    if not cupy.cuda.is_available():
        raise Skip(f"CuPy {cupy.__version__} finds no device")
    runtime = cupy.cuda.runtime
    notes.fact("version", cupy.__version__)
    notes.fact("driver", runtime.driverGetVersion())
    notes.fact("runtime", runtime.runtimeGetVersion())
    notes.fact("NVRTC", ".".join(map(str, cupy.cuda.nvrtc.getVersion())))
    for number in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(number)
        wanted = "name major minor multiProcessorCount totalGlobalMem l2CacheSize ECCEnabled"
        notes.fact(f"device {number}", {k: properties.get(k) for k in wanted.split()})
    notes.fact("free and total bytes", runtime.memGetInfo())


def configuration(notes):
    the("cupy")
    words = [sys.executable, "-c", "import cupy; cupy.show_config()"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    notes.fact("configuration", (done.stdout + done.stderr[-2000:]).strip())


def nccl(notes):
    nccl = the("cupy.cuda.nccl")
    if not getattr(nccl, "available", False):
        raise Skip("CuPy finds no libnccl")
    notes.fact("NCCL", nccl.get_version())


def cudnn(notes):
    """Report the version number returned by the library."""
    import ctypes

    for path in libraries("libcudnn.so*"):
        library = ctypes.CDLL(path)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        notes.fact(path, library.cudnnGetVersion())
    if not libraries("libcudnn.so*"):
        raise Skip("no libcudnn.so among the packages")


def libraries(pattern):
    """Return the paths of shared libraries in the packages of this Python."""
    folders = [Path(path) / "nvidia" for path in sys.path if path]
    return [str(path) for folder in folders for path in folder.glob(f"**/lib/{pattern}")]


def frontend(notes):
    cudnn = the("cudnn")
    notes.fact("version", cudnn.__version__)
    notes.fact("cuDNN behind it", cudnn.backend_version())


def torch(notes):
    torch = the("torch")
    notes.fact("version", torch.__version__)
    notes.fact("CUDA", torch.version.cuda)
    notes.fact("finds a device", torch.cuda.is_available())
    if torch.cuda.is_available():
        notes.fact("cuDNN", torch.backends.cudnn.version())
        notes.fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def mpi(notes):
    """Report mpi4py, its MPI, and the launchers."""
    from tests.gpu.ranks import launcher

    notes.fact("launcher", launcher())
    try:
        from mpi4py import MPI
    except Exception as error:  # without a library it is a RuntimeError
        raise Skip(f"no MPI in this process: {error}") from None
    notes.fact("library", MPI.Get_library_version().strip())


def imported(module, notes):
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("hpc3d"):
            raise
        raise Skip(f"no {error.name}") from None
    except RuntimeError as error:  # mpi4py without an MPI
        raise Skip(f"{error}") from None
