"""Check the installed MPI: the library that mpi4py loads, the mpirun on PATH, and the launcher.

Only `world` initializes MPI, because MPI_Init may abort if the library and the launcher are
incompatible.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc3d.console.sanitize import counted
from hpc3d.runtime import environment
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding
from hpc3d.runtime.probe import outcome, release

CONSENT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# Environment variables that allow oversubscription in Open MPI 4 and in Open MPI 5.
CROWD_4, CROWD_5 = "OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy"
_IN_A_JOB = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"}
CROWD = {CROWD_4: "1", CROWD_5: "slot:oversubscribe"}
YIELD = "OMPI_MCA_mpi_yield_when_idle"
_OPEN_MPI = "Open MPI"
UNKNOWN = "of unknown make"  # maker of a launcher that names no known MPI
# ABI -> prefixes of the supported `srun --mpi` types. The prefix pmix also matches pmix_v4.
_WAYS = {"Open MPI": ("pmix",), "MPICH": ("pmi2", "pmix", "cray")}
_LIBRARIES = Path("/usr/lib")
INSTALL = (
    "load the cluster's MPI module, or run python -m pip install 'hpc3d[mpi]'\n"
    "if the library is installed elsewhere, set MPI4PY_LIBMPI=/path/to/libmpi.so"
)


class MpiInstall(NamedTuple):
    """MPI library or launcher: its implementation, version and path (None if unknown)."""

    maker: str
    version: str | None
    path: str | None

    @property
    def abi(self) -> str:
        """Name of the ABI. A library and a launcher are compatible if they have the same ABI."""
        return "Open MPI" if self.maker == _OPEN_MPI else "MPICH"

    def __str__(self) -> str:
        return f"{self.maker} {self.version or '(of unknown version)'}, {self.path or 'no file'}"


def _loaded() -> MpiInstall:
    """Return the MPI library that mpi4py loads, without initializing MPI.

    Raises the exception of mpi4py or of the dynamic linker if no library can be loaded.
    """
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    maker, version = MPI.get_vendor()
    return MpiInstall(maker, ".".join(map(str, version)), library_file())


def found() -> MpiInstall | None:
    """Return the MPI library that mpi4py loads, or None if mpi4py cannot load one."""
    try:
        return _loaded()
    except Exception:  # RuntimeError from mpi4py, or ImportError from the linker
        return None


def world() -> int:
    """Initialize MPI and return the number of processes in MPI_COMM_WORLD."""
    from mpi4py import MPI

    if not MPI.Is_initialized():
        with environment.mpi_environment():
            MPI.Init_thread()
    return MPI.COMM_WORLD.size


def library_file() -> str | None:
    """Return the path of the MPI library that is loaded in this process, or None."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    library = r"/.*/lib(?:p?mpi|mpich)(?:_[a-z]+\d*)?\.so[.\d]*$"
    found = re.search(library, mapped, re.MULTILINE)
    return found and found[0]


def on_path() -> MpiInstall | None:
    """Run `mpirun --version`; return the MPI that the mpirun on PATH belongs to.

    Returns `None` if no mpirun is on PATH.
    """
    path = shutil.which("mpirun")
    return None if path is None else launcher_at(path)


def launcher_at(path: str) -> MpiInstall:
    """Run `mpirun --version` for the launcher at `path`; return the MPI that it belongs to."""
    _, printed = outcome([path, "--version"], 10)
    version = re.search(r"\d+\.\d+[.\d]*", printed)
    return MpiInstall(_maker_of(printed), version and version[0], path)


def _maker_of(printed: str) -> str:
    """Return the name of the MPI implementation that printed this `mpirun --version` output."""
    for word, maker in (("Open MPI", _OPEN_MPI), ("OpenRTE", _OPEN_MPI), ("Intel", "Intel MPI")):
        if word in printed:
            return maker
    return "MPICH" if "HYDRA" in printed.upper() else UNKNOWN


def library() -> Iterator[Finding]:
    """Check that mpi4py can load an MPI library, and report the library's name and path."""
    try:
        import mpi4py

        yield Finding(OK, "MPI library", f"{_loaded()} (mpi4py {mpi4py.__version__})")
    except Exception as error:  # RuntimeError from mpi4py, or ImportError from the linker
        text = f"{error}".strip().splitlines()[0]
        yield Finding(FAIL, "MPI library", f"cannot be loaded: {text}", _to_load())


def _to_load() -> str:
    """Return instructions to make mpi4py find an MPI library.

    mpi4py does not search for libmpich.so.12, the name of the MPICH library on Debian. If this
    file exists, the instructions create a symbolic link to it.
    """
    if not (files := [*_LIBRARIES.glob("*/libmpich.so.12")]):
        return INSTALL
    folder = Path(sys.prefix, "lib", "mpich")
    return (
        f"mkdir -p {folder} && ln -s {files[0]} {folder}/libmpi.so.12\n"
        f"export LD_LIBRARY_PATH={folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    )


def mpirun(mpi: MpiInstall, launcher: MpiInstall | None) -> Iterator[Finding]:
    """Check that the `launcher` on PATH (None: no mpirun) belongs to the library `mpi`."""
    if launcher is None:
        verdict = WARN if shutil.which("srun") else FAIL
        yield Finding(verdict, "mpirun", "not on PATH", put_on_path(mpi))
        return
    text = f"{launcher}, which belongs to the MPI library"
    if launcher.maker == UNKNOWN:
        text = f"the --version output of {launcher.path} names no known MPI"
        yield Finding(WARN, "mpirun", text, put_on_path(mpi))
    elif launcher.abi != mpi.abi:
        text = f"{launcher}, but the MPI library is {mpi.maker}: each rank would be a separate job"
        yield Finding(FAIL, "mpirun", text, put_on_path(mpi))
    elif launcher.version != mpi.version:
        text = f"{launcher}, but the MPI library has version {mpi.version}"
        yield Finding(WARN, "mpirun", text, put_on_path(mpi))
    else:
        yield Finding(OK, "mpirun", text)
    if launcher.maker == _OPEN_MPI:
        yield from root()
        yield from oversubscription(launcher)


def put_on_path(mpi: MpiInstall) -> str:
    """Return instructions to put the mpirun of the MPI library `mpi` first on PATH."""
    beside = Path(mpi.path or "/").parents[1 if mpi.path else 0] / "bin" / "mpirun"
    if beside.is_file():
        return f'put its mpirun first on PATH: export PATH="{beside.parent}:$PATH"'
    own = f"{mpi.maker} {mpi.version}"
    return f"load the module of {own}, or put the folder of its mpirun first on PATH"


def root() -> Iterator[Finding]:
    """If the user is root, check that Open MPI's mpirun is configured to run as root."""
    missing = [name for name in CONSENT if os.environ.get(name) != "1"]
    if os.geteuid() == 0 and missing:
        remedy = f"export {' '.join(f'{name}=1' for name in missing)}, or use another user"
        yield Finding(FAIL, "root", "Open MPI's mpirun refuses to run as root", remedy)


def oversubscription(launcher: MpiInstall) -> Iterator[Finding]:
    """Check that Open MPI's mpirun allows oversubscription, and that waiting ranks yield cores."""
    if allows_more(launcher):
        yield Finding(OK, "more ranks than cores", "mpirun allows them")
    else:
        name = CROWD_4 if _is_4(launcher) else CROWD_5
        verdict = OK if _IN_A_JOB & {*os.environ} else WARN
        remedy = f"export {name}={CROWD[name]}, or mpirun --oversubscribe"
        text = "mpirun refuses them"
        yield Finding(verdict, "more ranks than cores", text, remedy if verdict == WARN else "")
    if os.environ.get(YIELD) == "0":
        text = f"{YIELD}=0: waiting ranks do not yield their cores to working ranks"
        yield Finding(WARN, "more ranks than cores", text, f"unset {YIELD}")


def allows_more(launcher: MpiInstall) -> bool:
    """Return True if the environment or Open MPI's parameter file allows oversubscription."""
    if _is_4(launcher):
        return os.environ.get(CROWD_4) in ("1", "true")
    file = Path(launcher.path).resolve().parents[1] / "etc" / "prte-mca-params.conf"
    kept = file.read_text(encoding="utf-8") if file.is_file() else ""
    return "oversubscribe" in os.environ.get(CROWD_5, kept).lower()


def _is_4(launcher: MpiInstall) -> bool:
    return release(launcher.version or "5") < [5]


def slurm(mpi: MpiInstall) -> Iterator[Finding]:
    """Report the size of the Slurm job, if there is one, and check srun's `--mpi` types."""
    inside = "SLURM_JOB_ID" in os.environ
    if inside:
        tasks = environment.number_in(("SLURM_NTASKS",), default=1)
        nodes = environment.number_in(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), default=1)
        text = f"a job of {counted(tasks, 'task')} on {counted(nodes, 'node')}"
        yield Finding(OK, "Slurm", text)
    if shutil.which("srun") is None:
        return
    code, printed = outcome(["srun", "--mpi=list"], 10)
    if code == 0 or inside:
        yield _offer(re.findall(r"^(?:srun: |\s+)(\w+)\s*$", printed, re.MULTILINE), mpi)


def _offer(kinds: Sequence[str], mpi: MpiInstall) -> Finding:
    """Check that the MPI library supports one of srun's `--mpi` types."""
    text = f"srun offers {', '.join(kinds) or 'no --mpi type'}"
    taken = [kind for way in _WAYS[mpi.abi] for kind in kinds if kind.startswith(way)]
    if taken:
        return Finding(OK, "srun", f"{text}; use --mpi={taken[0]} for {mpi.maker}")
    remedy = "in the job, start ranks with mpirun (LAUNCH=mpirun in jobs/), not with srun"
    return Finding(WARN, "srun", f"{text}; {mpi.maker} supports none of them", remedy)


def started_by_other_mpi(mpi: MpiInstall) -> bool:
    """Return True if the mpirun of a different MPI implementation started this process.

    In this case, MPI_Init may abort.
    """
    return _starter() not in (None, mpi.abi)


def _starter() -> str | None:
    """Return the ABI of the mpirun that started this process, or `None` if none did."""
    names = {"OMPI_COMM_WORLD_SIZE": "Open MPI", "MPI_LOCALNRANKS": "MPICH"}
    return next((abi for name, abi in names.items() if name in os.environ), None)


def why_singletons(meant: int, mpi: MpiInstall) -> Finding:
    """Explain why each process of a launcher became an MPI singleton, a job of its own.

    `meant` is the number of processes that should have formed one job.
    """
    if _starter() is None:
        return Finding(FAIL, "launcher", *_of_slurm(meant, mpi))
    text = f"the mpirun of {_starter()} started {meant} processes, but each is its own MPI job: "
    other = "" if started_by_other_mpi(mpi) else "another "
    text += f"the MPI library is {other}{mpi.maker} {mpi.version}"
    return Finding(FAIL, "launcher", text, put_on_path(mpi))


def _of_slurm(meant: int, mpi: MpiInstall) -> tuple[str, str]:
    """Return the cause and the remedy for MPI singletons that were not started by mpirun."""
    kind = _WAYS[mpi.abi][0]
    remedy = f"srun --mpi={kind} python -m hpc3d... (srun --mpi=list prints the types)\n"
    remedy += f"or mpirun python -m hpc3d... in the job, with the mpirun of {mpi.maker}"
    if "SLURM_STEP_NUM_TASKS" not in os.environ:
        text = f"{meant} processes were requested, but neither srun nor mpirun started this one"
        return text, remedy
    spoken = "PMIx" if "PMIX_RANK" in os.environ else "PMI-2" if "PMI_RANK" in os.environ else None
    text = f"srun started {meant} processes, but each is its own MPI job: {mpi.maker} needs {kind}"
    return f"{text}, but srun provides {spoken or 'neither PMIx nor PMI-2'}", remedy


def mismatch_report(meant: int) -> list[str]:
    """Return error lines that explain why each process of a launcher is an MPI job of size 1.

    `meant` is the number of processes that should have formed one job.  Only rank 0 calls
    this function.  It is fast, because it starts no other process.
    """
    mpi, path = _loaded(), shutil.which("mpirun")
    told = [
        why_singletons(meant, mpi),
        Finding(OK, "MPI library", str(mpi)),
        Finding(OK if path else WARN, "mpirun", path or "not on PATH"),
    ]
    return [line for finding in told for line in finding.lines()]
