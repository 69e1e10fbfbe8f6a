"""Choice of the transport between devices, rejected combinations, and the start of NCCL."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from hpc3d.comm import cuda_aware_probe, transport
from hpc3d.comm.nccl import TYPES, split
from hpc3d.comm.transport import RankDevice, choose, cuda_aware_support, refuse, sharing
from hpc3d.console.exit_codes import BAD_INPUT, JobExit
from hpc3d.cuda import device
from tests.diagnose.planted import script
from tests.elided import elided
from tests.fakes.fake_cupy import FakeCupy

ONE = RankDevice("node1", "bus a", "H200 (0)", 22707, False, False)
OWN = [ONE, ONE._replace(device="bus b", name="H200 (1)")]
BOTH_0 = [ONE, ONE._replace(host="node2")]  # of two hosts
SHARED = [ONE, ONE]
BEFORE = [OWN[0], OWN[1]._replace(nccl=22507)]
WITHOUT = [ONE, OWN[1]._replace(nccl=0)]
SEVERAL = [ONE._replace(nccl=23000, several=True)] * 2
OLD = [ONE._replace(several=True)] * 2
SHOWN = "ranks 0-1 share device H200 (0) of node1"
NONE, P2P, FULL = ("none", "it says no"), ("p2p", "it is said"), ("full", "it was tried")


@pytest.mark.parametrize(
    ("asked", "seats", "mpi", "way", "why"),
    [
        ("auto", OWN, None, "nccl", "NCCL 2.27.7"),
        ("auto", BOTH_0, None, "nccl", "NCCL 2.27.7"),
        ("nccl", OWN, None, "nccl", "NCCL"),
        ("auto", SHARED, NONE, "host-staged", f"{SHOWN}, ... it says no"),
        ("auto", SHARED, FULL, "mpi", "it was tried"),
        ("auto", SHARED, P2P, "mpi-messages", "it is said"),
        ("auto", WITHOUT, NONE, "host-staged", "NCCL ... ranks 1; it says no"),
        ("auto", WITHOUT, FULL, "mpi", "no NCCL"),
        ("auto", BEFORE, NONE, "host-staged", "NCCL 2.25.7 ... 2.26.0"),
        ("auto", SEVERAL, NONE, "host-staged", SHOWN),
        ("nccl", SEVERAL, None, "nccl", "NCCL 2.30.0"),
        ("mpi", OWN, FULL, "mpi", "it was tried"),
        ("host-staged", OWN, None, "host-staged", "requested"),
        ("auto", [ONE], None, "none", "one rank"),
        ("nccl", [ONE], None, "none", "one rank"),
    ],
)
def test_transport_is_chosen_by_devices_and_mpi_support(asked, seats, mpi, way, why, monkeypatch):
    """`mpi` is None if MPI must not be probed, because a probe takes seconds."""
    monkeypatch.setattr(transport, "cuda_aware_support", lambda devices: mpi)
    found, reason = choose(asked, seats)
    assert found == way and re.search(elided(why), reason)


@pytest.mark.parametrize(
    ("asked", "seats", "line"),
    [
        ("nccl", SHARED, f"mesh.transport = nccl: {SHOWN}"),
        ("nccl", OLD, f"mesh.transport = nccl: {SHOWN}"),
        ("nccl", WITHOUT, "mesh.transport = nccl: ... ranks 1;"),
        ("mpi", OWN, "mesh.transport = mpi: it says no; ... HPC3D_MPI_DEVICE=full"),
    ],
)
def test_impossible_transport_is_rejected(asked, seats, line, monkeypatch):
    monkeypatch.setattr(transport, "cuda_aware_support", lambda devices: NONE)
    with pytest.raises(ValueError) as refused:
        choose(asked, seats)
    assert re.match(elided(f"{line}... mesh.transport = auto"), str(refused.value))


def test_gpu_partitions_are_separate_devices():
    parts = [ONE._replace(device=f"bus a {part}") for part in "xyy"]
    (line,) = sharing(parts)
    assert line.startswith("ranks 1-2 share")


AWARE = [device._replace(aware=True) for device in OWN]


@pytest.mark.parametrize(
    ("seats", "does", "said", "what"),
    [
        (OWN, "echo taken", None, "none"),
        (AWARE, "echo taken", None, "full"),
        ([*AWARE, ONE], "echo taken", None, "none"),
        (AWARE, "echo staged", None, "none"),
        (AWARE, "echo taken; echo wrong", None, "none"),
        (AWARE, "kill -SEGV $$", None, "none"),
        (AWARE, "exit 1", "full", "full"),
        (AWARE, "echo taken", "none", "none"),
        (OWN, "exit 1", "p2p", "p2p"),
    ],
)
def test_mpi_device_support_is_probed_or_set_by_the_user(
    seats, does, said, what, tmp_path, monkeypatch
):
    """MPI is probed if the MPI of all ranks claims support, unless the user has set it."""
    script(tmp_path / "mpirun", does)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(transport.OVERRIDE, raising=False)
    if said:
        monkeypatch.setenv(transport.OVERRIDE, said)
    assert cuda_aware_support(seats)[0] == what


def test_unknown_mpi_device_setting_is_rejected(monkeypatch):
    monkeypatch.setenv(transport.OVERRIDE, "yes")
    with pytest.raises(ValueError, match=r"HPC3D_MPI_DEVICE=yes: .*none, p2p or full"):
        cuda_aware_support(OWN)


def test_mpi_probe_removes_job_variables_from_its_environment(tmp_path, monkeypatch):
    told = {"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "9", "SLURM_JOB_ID": "3", "PMI_RANK": "1"}
    kept = {"OMPI_MCA_pml": "ucx", "OMPI_ALLOW_RUN_AS_ROOT": "1", "LD_LIBRARY_PATH": "/ucx"}
    for name, value in (told | kept).items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"
    cuda_aware_probe.tried(script(tmp_path / "mpirun", f"env > {seen}"), 5)
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert not names & told.keys() and names >= kept.keys()


def missing(monkeypatch, cupy, asked="auto", dtype="float32", nccl=23203):
    """Return the missing parts that the probe reports for a fake CuPy (None: no CuPy)."""
    absent = set() if cupy else {"cupy"}
    monkeypatch.setattr(
        cuda_aware_probe, "find_spec", lambda name: None if name in absent else True
    )
    monkeypatch.setattr(device, "imported", lambda: cupy)
    monkeypatch.setattr(cuda_aware_probe, "nccl_version", lambda: nccl)
    return cuda_aware_probe.missing(asked, dtype)


def runtime(**answers):
    """Return a CuPy whose runtime reports this."""
    fake = FakeCupy()
    vars(fake.cuda.runtime).update({name: lambda *_, a=a: a for name, a in answers.items()})
    return fake


def test_complete_gpu_stack_has_no_missing_dependency(monkeypatch):
    assert missing(monkeypatch, FakeCupy(), "nccl", "bfloat16") is None


@pytest.mark.parametrize(
    ("cupy", "how", "line", "remedy"),
    [
        (None, {}, "CuPy ", "gpu-cuda12"),
        (FakeCupy(count=0), {}, "CuPy ... device; ", "--gpus-per-node"),
        (runtime(driverGetVersion=0), {}, "no NVIDIA driver ...; ", "with a GPU"),
        (
            runtime(driverGetVersion=12080, runtimeGetVersion=13000),
            {},
            "CUDA 12.8, but CuPy ... 13.0; ",
            "cupy-cuda12x",
        ),
        (
            runtime(getDeviceProperties={"major": 7}),
            {"dtype": "bfloat16"},
            "7 ... bfloat16; ",
            "float16",
        ),
        (FakeCupy(), {"asked": "nccl", "nccl": 0}, "mesh.transport = nccl, ", "gpu-cuda12"),
    ],
)
def test_missing_gpu_dependency_is_one_line_with_a_fix(cupy, how, line, remedy, monkeypatch):
    said = missing(monkeypatch, cupy, **how)
    assert re.match(elided(f"train.backend = cupy: ...{line}"), said) and "\n" not in said
    assert remedy in said and said.endswith("train.backend = numpy")


def test_outdated_or_broken_cupy_is_reported(monkeypatch):
    old = FakeCupy()
    old.__version__ = "13.6.0"
    assert "CuPy 13.6.0 " in missing(monkeypatch, old)
    missing(monkeypatch, FakeCupy())
    monkeypatch.setattr(device, "imported", lambda: __import__("nothing_of_that_name"))
    assert "(No module named" in cuda_aware_probe.missing("auto", "float32")


@pytest.mark.parametrize(
    ("problems", "lines"),
    [
        (["no CuPy"] * 4, ["no CuPy"]),
        ([None, "no CuPy", "no CuPy", None], ["no CuPy (ranks 1-2)"]),
        (["no CuPy", "no device"], ["no CuPy (ranks 0)", "no device (ranks 1)"]),
    ],
)
def test_identical_problems_of_ranks_are_reported_once(problems, lines):
    said = []

    def told(*problems):
        said.extend(problems)
        raise JobExit(BAD_INPUT)

    with pytest.raises(JobExit):
        refuse(SimpleNamespace(refuse=told), problems)
    assert said == lines


def test_refuse_without_problems_does_nothing():
    refuse(None, [None, None])


class Library:
    """Fake NCCL that records its calls; all ranks must create communicators in the same order."""

    class NcclError(RuntimeError):
        pass

    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails

    def get_unique_id(self):
        self.log.append("id")
        return b"x" * 128

    def NcclCommunicator(self, size, name, rank):
        if self.fails:
            raise self.NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")
        assert name == b"x" * 128
        self.log.append((size, rank))
        return SimpleNamespace(commSplit=lambda color, key: self.log.append((color, key)) or color)


def rank_of(rank, size):
    """Communicator of all ranks in MPI; rank 0 provides the id for NCCL."""
    return SimpleNamespace(rank=rank, size=size, bcast=lambda name: name or b"x" * 128)


def test_nccl_starts_with_all_ranks_and_splits_by_axis():
    logs = []
    for rank in range(4):  # on a mesh of d = 2, x = 2
        lines = {"d": (rank % 2, rank // 2), "x": (rank // 2 * 2, rank % 2)}
        log = []
        _, parts = split(Library(log), rank_of(rank, 4), lines)
        assert list(parts) == ["d", "x"]
        logs.append(log)
    assert [log.count("id") for log in logs] == [1, 0, 0, 0]
    assert logs[0][1:] == [(4, 0), (0, 0), (0, 0)]
    assert logs[3] == [(4, 3), (1, 1), (2, 1)]


def test_nccl_start_error_is_one_line():
    with pytest.raises(RuntimeError, match=r"NCCL .*INVALID_USAGE.*DEBUG=WARN"):
        split(Library([], fails=True), rank_of(0, 2), {})


def test_nccl_supports_bfloat16():
    pytest.importorskip("ml_dtypes")
    names = [np.dtype(name).name for name in ("float16", "float32", "bfloat16")]
    assert [TYPES[name] for name in names] == [6, 7, 9]
    assert "uint16" not in TYPES
