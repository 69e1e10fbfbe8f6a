"""Checks that involve all ranks of a job: placement, versions, shared folder, communication.

Checks are collective: all ranks call a check, and the check yields the same findings on each rank,
so that only rank 0 needs to print the findings.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

import hpc3d
from hpc3d.comm.cartesian import build
from hpc3d.comm.shared_memory import SharedMemory
from hpc3d.console.sanitize import counted
from hpc3d.diagnose.node_checks import requirements, size
from hpc3d.diagnose.storage_checks import ELSEWHERE, scratch
from hpc3d.runtime.environment import cores_of_node
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding
from hpc3d.runtime.host_map import spans
from hpc3d.runtime.mpi_library import YIELD
from hpc3d.runtime.probe import installed
from hpc3d.runtime.shared_folder import REMEDY, appears

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.runtime.job import Job

_SMALL, _LARGE = 8, 4 << 20  # message sizes in bytes
_EXCHANGES, _LARGE_EXCHANGES = 200, 10
_SUMMED = 1 << 17  # number of elements in the all-reduced array


def report_hosts(job: Job) -> Iterator[Finding]:
    """Report the ranks on each host, and any problems with the rank order or core binding."""
    mine = job.location() | {"bound": os.sched_getaffinity(0), "cores": cores_of_node()}
    hosts, everyone = defaultdict(list), job.gather(mine)
    for rank, where in enumerate(everyone):
        hosts[where["host"]].append(rank)
    listed = ", ".join(f"{host} {spans(ranks)}" for host, ranks in hosts.items())
    yield Finding(OK, "ranks", f"{job.size} on {counted(len(hosts), 'host')}: {listed}")
    if any(ranks[-1] - ranks[0] >= len(ranks) for ranks in hosts.values()):
        text = "consecutive ranks are on different hosts, so mesh axes span hosts"
        remedy = "use srun --distribution=block or mpirun --map-by core to fill one host at a time"
        yield Finding(WARN, "order", text, remedy)
    for host, ranks in hosts.items():
        here = [everyone[rank] for rank in ranks]
        yield from _numbering(host, [where["local_rank"] for where in here])
        used = len(set().union(*(where["bound"] for where in here)))
        yield from _oversubscription(host, len(ranks), used, here[0]["cores"])


def _numbering(host: str, numbers: Sequence[int]) -> Iterator[Finding]:
    """Check that MPI treats a host as one node, i.e. its local ranks are 0, 1, 2, ..."""
    if sorted(numbers) != list(range(len(numbers))):
        text = (
            f"MPI treats {host} as several nodes (local ranks {spans(numbers)}), so its ranks "
            "cannot share memory or devices"
        )
        remedy = (
            "start one container per node; in Slurm, set NodeName to the host name, or use mpirun"
        )
        yield Finding(WARN, "local ranks", text, remedy)


def _oversubscription(host: str, ranks: int, used: int, cores: int) -> Iterator[Finding]:
    """Check whether the ranks of a host compete for cores.

    The `ranks` ranks of the host may run on `used` of its `cores` cores.
    """
    if used < min(ranks, cores):
        text = f"{ranks} ranks of {host} share {used} of its {counted(cores, 'core')}"
        remedy = "use mpirun --bind-to none, or srun with --cpus-per-task (jobs/README.md)"
        yield Finding(WARN, "cores", text, remedy)
    elif ranks > cores:
        verdict = WARN if os.environ.get(YIELD) == "0" else OK
        text = f"{ranks} ranks of {host} compete for {counted(cores, 'core')}"
        yield Finding(verdict, "cores", text, f"unset {YIELD}" if verdict == WARN else "")


def alike(job: Job) -> Iterator[Finding]:
    """Check that all ranks use the same package versions and the same hpc3d source files."""
    mine = {
        "hpc3d": hpc3d.__version__,
        "sources": _sources(),
        "Python": platform.python_version(),
        "MPI": " ".join(job.library().split()),
    }
    mine |= {name: installed(name) for name, _ in requirements()}
    everyone, hosts = job.gather(mine), job.gather(socket.gethostname())
    names = dict.fromkeys(name for versions in everyone for name in versions)
    differing = {name: [versions.get(name) for versions in everyone] for name in names}
    texts = [
        f"{name} {_unlike(found, hosts)}" for name, found in differing.items() if len({*found}) > 1
    ]
    if texts:
        remedy = (
            "use the same Python environment on all hosts, for example from a shared folder or an "
            "environment module (module load)"
        )
        yield Finding(FAIL, "versions", "; ".join(texts), remedy)
    else:
        listed = ", ".join(f"{name} {mine[name]}" for name, _ in requirements())
        yield Finding(OK, "versions", f"equal: {mine['MPI']}, {listed}; sources {mine['sources']}")


def _unlike(found: Sequence[str | None], hosts: Sequence[str]) -> str:
    """Format distinct values with the hosts of each value, such as "2.1 on hn1, 2.0 on hn2".

    `found` contains the value on each rank. If values differ between the ranks of a host, ranks
    are listed instead of hosts.
    """
    ranks, parts = defaultdict(list), []
    for rank, value in enumerate(found):
        ranks[value].append(rank)
    split = len({*zip(hosts, found, strict=True)}) > len({*hosts})
    for value, who in ranks.items():
        where = f"ranks {spans(who)}" if split else " ".join(dict.fromkeys(hosts[r] for r in who))
        parts.append(f"{value or 'missing'} on {where}")
    return ", ".join(parts)


def _sources() -> str:
    """Return a short hash of hpc3d's files, excluding the machine-dependent files in `share`."""
    top, whole = Path(hpc3d.__file__).parent, hashlib.sha256()
    for path in sorted(top.rglob("*")):
        if not {"__pycache__", "share"} & {*path.relative_to(top).parts} and path.is_file():
            whole.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:12]


def one_folder(job: Job, folder: Path) -> Iterator[Finding]:
    """Check that all ranks share `folder`: each rank must see a subfolder created by rank 0."""
    made, homes = None, job.homes()
    if job.rank == 0:
        with suppress(OSError):
            made = scratch(folder)
    name = job.comm.bcast(made and made.name)
    blind = [rank for rank, sees in enumerate(job.gather(name and appears(name))) if not sees]
    if made:
        made.cleanup()
    if name is None:
        yield Finding(FAIL, "folder", f"rank 0 cannot write to {folder}", ELSEWHERE)
    elif blind:
        text = f"{folder} is a different folder for {homes.named(blind)}"
        yield Finding(FAIL, "folder", text, REMEDY)
    else:
        yield Finding(OK, "folder", f"{folder} is the same for all ranks")


def sums(job: Job) -> Iterator[Finding]:
    """Check that an MPI all-reduce over all ranks returns the correct result."""
    if job.size == 1:
        return
    comm = build({"x": job.size}, job.comm, transport="mpi").comm("x")
    text = f"all-reduce of {size(_SUMMED * 8)} over all ranks"
    yield _verdict_on(job, "MPI", _known_sum(comm), text)


def transport(job: Job) -> Iterator[Finding]:
    """Check the results of an all-reduce and an all-gather on each node.

    The collectives use shared memory if it is available, otherwise MPI.
    """
    node = job.comm.Split_type(MPI.COMM_TYPE_SHARED)
    if max(job.gather(node.size)) == 1:
        return
    comm = build({"x": node.size}, node).comm("x")
    before = time.perf_counter()
    right = _known_sum(comm) and _known_gather(comm)
    spent = max(job.gather(time.perf_counter() - before))
    how = "shared memory" if isinstance(comm, SharedMemory) else "MPI"
    what = f"all-reduce and all-gather of {size(_SUMMED * 8)} on each node"
    text = f"{what}, by {how}, in {spent * 1e3:.1f} ms"
    yield _verdict_on(job, "node", right, text)


def _known_sum(comm: Communicator) -> bool:
    numbers = np.arange(_SUMMED, dtype=np.int64)
    total = comm.all_reduce(numbers + comm.rank).wait()
    return np.array_equal(total, comm.size * numbers + sum(range(comm.size)))


def _known_gather(comm: Communicator) -> bool:
    """Return True if an all-gather over `comm` returns the block of each member, in rank order."""
    block = np.full(_SUMMED // comm.size, comm.rank)
    whole = comm.all_gather(block).wait().reshape(comm.size, -1)
    return (whole == np.arange(comm.size)[:, None]).all()


def _verdict_on(job: Job, subject: str, right: bool, text: str) -> Finding:
    """Return an OK Finding, or a FAIL Finding that lists the ranks on which a test failed.

    `right` is True if the test passed on this rank.
    """
    wrong = [rank for rank, good in enumerate(job.gather(bool(right))) if not good]
    if not wrong:
        return Finding(OK, subject, text)
    remedy = "use another transport (--mesh.transport mpi) or another MPI version"
    return Finding(FAIL, subject, f"{text}: wrong result on ranks {spans(wrong)}", remedy)


def link(job: Job) -> Iterator[Finding]:
    """Measure the latency and bandwidth of messages between rank 0 and the last rank."""
    if job.size == 1:
        return
    latency = min(_exchanges(job, np.zeros(_SMALL, np.uint8), _EXCHANGES))
    transfer = min(_exchanges(job, np.zeros(_LARGE, np.uint8), _LARGE_EXCHANGES))
    job.barrier()  # job.barrier sleeps while waiting, so that the ranks do not occupy shared cores
    latency, transfer = job.comm.bcast((latency, transfer))
    rate = f"bandwidth {size(_LARGE / transfer)}/s ({size(_LARGE)})"
    text = f"latency {latency * 1e6:.1f} us ({_SMALL} B), {rate}"
    yield Finding(OK, "messages", f"rank 0 to rank {job.size - 1}: {text}, best of all messages")


def _exchanges(job: Job, block: np.ndarray, times: int) -> list[float]:
    """Return the one-way times of `times` messages in s: half the round-trip times on rank 0."""
    last, spent = job.size - 1, []
    for _ in range(times):
        before = time.perf_counter()
        if job.rank == 0:
            job.comm.Send(block, last)
            job.comm.Recv(block, last)
        elif job.rank == last:
            job.comm.Recv(block, 0)
            job.comm.Send(block, 0)
        spent.append((time.perf_counter() - before) / 2)
    return spent
