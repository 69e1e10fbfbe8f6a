"""Check with point-to-point messages and a timeout that all ranks of a job can communicate.

If MPI finds no network that connects all hosts, its first collective call hangs, or MPI ends the
job with an error message. Therefore, each rank publishes its result under a name with
MPI_Publish_name: the launcher, which is connected to all hosts, transfers this result to rank 0.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from mpi4py import MPI

from hpc3d.runtime.finding import FAIL, Finding
from hpc3d.runtime.host_map import spans

_WITHIN = 5  # time limit in s for the exchange of test messages
_LATER = 2  # additional time limit in s for receiving the reports of other ranks
# In jobs with at most ALL_PAIRS ranks, all pairs exchange messages. In larger jobs, each rank
# exchanges messages with the ranks at distances 1, 2, 4, ...
ALL_PAIRS = 128
_SIZE = 64  # message size in bytes
_SPOKEN = 0.2  # delay in s after printing, so that the launcher can forward the output
_REMEDY = """\
set OMPI_MCA_btl_tcp_if_include to the network interface that connects these hosts (see ip -br
addr), and open all ports of any firewall between them"""


class Board:
    """Bulletin board: short texts that ranks publish and look up through the launcher.

    The texts are transferred by MPI name publishing (MPI_Publish_name). If the launcher does not
    support it, all texts are empty.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.job, self.works = comm, os.environ.get("PMIX_NAMESPACE", ""), True

    def tell(self, what: str, text: str) -> None:
        try:
            MPI.Publish_name(self.name(what, self.comm.rank), text)
        except MPI.Exception:
            self.works = False

    def read(self, what: str, until: float) -> list[str]:
        """Return each rank's text, or "" for a rank that publishes nothing before time `until`."""
        return [self.text(what, rank, until) for rank in range(self.comm.size)]

    def text(self, what: str, rank: int, until: float) -> str:
        while self.works:
            try:
                return MPI.Lookup_name(self.name(what, rank))
            except MPI.Exception:
                if time.monotonic() > until:
                    return ""
                time.sleep(0.05)
        return ""

    def name(self, what: str, rank: int) -> str:
        return f"hpc3d-{self.job}-{what}-{rank}"


def meet() -> Finding | None:
    """Exchange messages between ranks to check that they can reach each other.

    Rank 0 returns a Finding if any two peers cannot reach each other, else None. Any other rank
    returns None if it can reach all of its peers; otherwise, it exits. The caller on rank 0 then
    aborts the job.
    """
    comm, end = MPI.COMM_WORLD, time.monotonic() + _WITHIN
    board = Board(comm)
    board.tell("host", socket.gethostname())
    hosts = board.read("host", end) if comm.rank == 0 else []
    if len(set(hosts)) > 1:
        _announce(hosts)
    if comm.rank == 0:
        board.tell("begin", "now")
    else:
        board.text("begin", 0, end)
    missing = _exchange(comm, end)
    board.tell("missing", f"ranks {spans(missing)}")
    if comm.rank:
        if missing:
            time.sleep(_WITHIN + 2 * _LATER)
            os._exit(1)
        return None
    told = [*map(numbers, board.read("missing", end + _LATER))]
    told[0] = missing
    pairs = {tuple(sorted((rank, peer))) for rank, peers in enumerate(told) for peer in peers}
    return finding(pairs, hosts) if pairs else None


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks with which `rank` exchanges test messages."""
    if size <= ALL_PAIRS:
        return [other for other in range(size) if other != rank]
    steps = [1 << power for power in range((size - 1).bit_length())]
    return sorted({(rank + way * step) % size for step in steps for way in (1, -1)} - {rank})


def _exchange(comm: MPI.Intracomm, end: float) -> list[int]:
    """Exchange messages with all peers until time `end`. Return the peers that did not respond."""
    kept, waiting = [], []
    for peer in peers(comm.rank, comm.size):
        sent, received = np.zeros(_SIZE, np.uint8), np.empty(_SIZE, np.uint8)
        kept += [sent, received]
        waiting += [(peer, comm.Irecv(received, peer)), (peer, comm.Isend(sent, peer))]
    while waiting and time.monotonic() < end:
        waiting = [(peer, request) for peer, request in waiting if not request.Test()]
        time.sleep(0.002)
    return sorted({peer for peer, _ in waiting})


def numbers(text: str) -> list[int]:
    """Parse a text formatted by `spans`, such as "0-2 4-7", and return the list of numbers."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [each for first, last in found for each in range(int(first), int(last or first) + 1)]


def finding(pairs: Iterable[Sequence[int]], hosts: Sequence[str]) -> Finding:
    """Return a Finding that lists the hosts of the `pairs` of ranks that cannot communicate."""
    apart = defaultdict(set)
    for pair in pairs:
        apart[tuple(hosts[rank] or f"rank {rank}" for rank in pair)].update(pair)
    listed = "; ".join(
        f"{' and '.join(where)} (ranks {spans(sorted(ranks))})"
        for where, ranks in sorted(apart.items())
    )
    return Finding(FAIL, "meeting", f"no message in {_WITHIN} s between {listed}", _REMEDY)


def _announce(hosts: Sequence[str]) -> None:
    """Before the first message is sent, print a notice that names the hosts and a remedy.

    MPI may abort the job at this message, and its own error message names neither.
    """
    between = ", ".join(dict.fromkeys(filter(None, hosts)))
    line = f"testing messages between {between}; if MPI ends the job now, {_REMEDY}"
    print("hpc3d.doctor: " + " ".join(line.split()), file=sys.stderr, flush=True)
    time.sleep(_SPOKEN)


def end(code: int) -> None:
    """Abort the job: terminate all ranks with exit code `code`."""
    MPI.COMM_WORLD.Abort(code)
