"""Choose the transport of a job, that is, how ranks with devices communicate.

    nccl            NCCL, if each rank has its own device
    mpi             MPI on device memory, if MPI supports it (CudaAwareMpi)
    mpi-messages    MPI on device memory for messages, host staging otherwise (CudaAwareMessages)
    host-staged     MPI through host memory (HostStaged)
    none            a single rank without communication

The transport is chosen without running code that might abort the job (see
hpc3d.comm.cuda_aware_probe).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.comm import cuda_aware_probe
from hpc3d.comm.nccl import OLDEST
from hpc3d.runtime.finding import OK, Finding
from hpc3d.runtime.host_map import spans
from hpc3d.runtime.mpi_library import library_file

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda
    from hpc3d.runtime.job import Job

OVERRIDE = "HPC3D_MPI_DEVICE"
# Dict from MPI's level of support for device memory to the name of the transport.
_WAYS = {"none": "host-staged", "p2p": "mpi-messages", "full": "mpi"}
# Environment variable that lets several ranks share a device (NCCL 2.30 and later).
_SEVERAL = "NCCL_MULTI_RANK_GPU_ENABLE"
_PATIENCE = 60  # timeout in seconds of the CUDA-aware MPI test


class RankDevice(NamedTuple):
    """Device of a rank, and capabilities of the rank's communication libraries.

    `device` identifies the device on its host, and `name` describes it.  `nccl` is the version
    number of NCCL, or 0 if NCCL is not installed.  `several` is True if the environment allows
    NCCL ranks to share a device.  `aware` is True if MPI reports CUDA support.
    """

    host: str
    device: str
    name: str
    nccl: int
    several: bool
    aware: bool


def choose_transport(job: Job, asked: str, dtype: str) -> tuple[Cuda, str, tuple[str, ...]]:
    """Bind this rank's device and choose the transport of all ranks.

    `asked` is mesh.transport, and `dtype` is train.dtype. Returns the device, the transport, and
    log lines that explain the choice. If the request cannot be met, the job ends with an error.
    """
    refuse(job, job.gather(cuda_aware_probe.missing(asked, dtype)))
    device, devices = _rank_devices(job)
    way, why = job.from_root(lambda: choose(asked, devices))
    names = ", ".join(sorted({rank_device.name for rank_device in devices}))
    return device, way, (f"on {names}; transport {way}: {why}", *sharing(devices))


def _rank_devices(job: Job) -> tuple[Cuda, list[RankDevice]]:
    """Bind this rank's device; return it and a description of every rank's device."""
    from hpc3d.cuda.device import bound

    location = job.location()
    device = bound(location["local_rank"])
    there = f"{device.bus} {device.uuid}"  # MIG instances share a bus ID
    several = os.environ.get(_SEVERAL) == "1"
    aware = cuda_aware_probe.says_yes(library_file())
    nccl = cuda_aware_probe.nccl_version()
    mine = RankDevice(location["host"], there, str(device), nccl, several, aware)
    return device, job.gather(mine)


def explained(job: Job) -> Iterator[Finding]:
    """If every rank has a device, yield a finding that names the transport `auto` selects."""
    if all(job.gather(cuda_aware_probe.present())):
        _, devices = _rank_devices(job)
        way, why = job.from_root(lambda: choose("auto", devices))
        yield Finding(OK, "transport", f"mesh.transport = auto selects {way}: {why}")


def refuse(job: Job, problems: Sequence[str | None]) -> None:
    """Print each distinct problem and end the job, unless all ranks' `problems` are `None`."""
    ranks: dict[str | None, list[int]] = {}
    for rank, problem in enumerate(problems):
        ranks.setdefault(problem, []).append(rank)
    found = ranks.pop(None, None)
    where = [f" (ranks {spans(who)})" if found or len(ranks) > 1 else "" for who in ranks.values()]
    if ranks:
        job.refuse(*(f"{what}{who}" for what, who in zip(ranks, where, strict=True)))


def choose(asked: str, devices: Sequence[RankDevice]) -> tuple[str, str]:
    """Return the transport for ranks with these `devices`, and the reason.

    `asked` is mesh.transport. Raises ValueError if the requested transport is impossible.
    """
    if len(devices) == 1:
        return "none", "there is one rank"
    reasons = []
    if asked in ("auto", "nccl"):
        problem = _against_nccl(asked, devices)
        if problem is None:
            return "nccl", f"NCCL {cuda_aware_probe.release_of(devices[0].nccl)}"
        _refuse_if(asked == "nccl", asked, problem)
        reasons.append(problem)
    if asked in ("auto", "mpi"):
        what, how = cuda_aware_support(devices)
        if what != "none":
            return _WAYS[what], "; ".join([*reasons, how])
        remedy = f"set {OVERRIDE}=full if MPI supports device memory"
        _refuse_if(asked == "mpi", asked, f"{how}; {remedy}")
        reasons.append(how)
    return "host-staged", "; ".join(reasons) or "as requested"


def _refuse_if(wrong: bool, asked: str, problem: str) -> None:
    if wrong:
        raise ValueError(f"mesh.transport = {asked}: {problem}; or use mesh.transport = auto")


def _against_nccl(asked: str, devices: Sequence[RankDevice]) -> str | None:
    """Explain why these ranks cannot use NCCL; return `None` if they can."""
    without = [rank for rank, rank_device in enumerate(devices) if not rank_device.nccl]
    if without:
        return f"no NCCL on ranks {spans(without)}"
    if (oldest := min(rank_device.nccl for rank_device in devices)) < OLDEST:
        found, needed = map(cuda_aware_probe.release_of, (oldest, OLDEST))
        return f"NCCL {found} is older than {needed}; run {cuda_aware_probe.EXTRAS}"
    allowed = asked == "nccl" and all(
        rank_device.several and rank_device.nccl >= 23000 for rank_device in devices
    )
    return None if allowed else next(iter(sharing(devices)), None)


def sharing(devices: Sequence[RankDevice]) -> list[str]:
    """Return a message for each device that several ranks share."""
    there: dict[tuple[str, str, str], list[int]] = {}
    for rank, rank_device in enumerate(devices):
        there.setdefault((rank_device.host, rank_device.device, rank_device.name), []).append(rank)
    return [
        f"ranks {spans(ranks)} share device {name} of {host}, so only one of them runs at a time"
        for (host, _, name), ranks in there.items()
        if len(ranks) > 1
    ]


def cuda_aware_support(devices: Sequence[RankDevice]) -> tuple[str, str]:
    """Return MPI's support for device memory (none, p2p or full), and the evidence for it.

    The evidence is the user's setting, or the support reported by MPI and verified by two ranks in
    separate processes. Only rank 0 calls this function.
    """
    said = os.environ.get(OVERRIDE)
    if said is not None and said not in _WAYS:
        raise ValueError(f"{OVERRIDE}={said}: set it to none, p2p or full, or unset it")
    if said is not None:
        return said, f"{OVERRIDE}={said}"
    if not all(rank_device.aware for rank_device in devices):
        return "none", "MPI does not report support for device memory"
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return "none", "MPI reports support for device memory, but no mpirun is on PATH to test it"
    answer, problem = cuda_aware_probe.tried(mpirun, _PATIENCE)
    if answer == cuda_aware_probe.TAKEN:
        return "full", "MPI supports device memory, as tested with two ranks"
    problem = problem or "a test with two ranks found no such support"
    return "none", f"MPI reports support for device memory, but {problem}"
