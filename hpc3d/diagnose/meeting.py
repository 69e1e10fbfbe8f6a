"""Check that all ranks of a job can reach each other, by messages with a time limit.

If hosts have no common network that MPI uses, the first collective call of MPI hangs, or MPI ends
the job with its own message.  Therefore, ranks report their results to rank 0 through the
launcher, which has reached all hosts, by MPI's name publishing.
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

from hpc3d.diagnose.job_checks import spans
from hpc3d.runtime.finding import FAIL, Finding

_WITHIN = 5  # time limit of the messages in s
_LATER = 2  # delay in s allowed to other ranks
ALL_PAIRS = 128  # ranks; in larger jobs, each rank exchanges with ranks at distances 1, 2, 4, ...
_SIZE = 64  # bytes of a message
_SPOKEN = 0.2  # s until printed output has left the host
_REMEDY = """\
export OMPI_MCA_btl_tcp_if_include=NAME, the network interface that connects these hosts (see ip
-br addr), and open all ports of a firewall between them"""


class Board:
    """Messages between ranks through the launcher; all are empty if it does not support them."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.job, self.works = comm, os.environ.get("PMIX_NAMESPACE", ""), True

    def tell(self, what: str, text: str) -> None:
        try:
            MPI.Publish_name(self.name(what, self.comm.rank), text)
        except MPI.Exception:
            self.works = False

    def read(self, what: str, until: float) -> list[str]:
        """Return the text that each rank has published by the time `until`, or "" if none."""
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


def meet(comm: MPI.Intracomm = MPI.COMM_WORLD, within: float = _WITHIN) -> Finding | None:
    """Exchange messages between ranks; rank 0 returns a Finding if a peer is unreachable, or None.

    Other ranks return None if they reach all their peers.  Otherwise they exit, and the caller on
    rank 0 ends the job.
    """
    board, end = Board(comm), time.monotonic() + within
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
            time.sleep(within + 2 * _LATER)
            os._exit(1)
        return None
    told = [*map(numbers, board.read("missing", end + _LATER))]
    told[0] = missing
    pairs = {tuple(sorted((rank, peer))) for rank, peers in enumerate(told) for peer in peers}
    return finding(pairs, hosts, within) if pairs else None


def peers(rank: int, size: int) -> list[int]:
    """Return the ranks that a rank exchanges messages with."""
    if size <= ALL_PAIRS:
        return [other for other in range(size) if other != rank]
    steps = [1 << power for power in range((size - 1).bit_length())]
    return sorted({(rank + way * step) % size for step in steps for way in (1, -1)} - {rank})


def _exchange(comm: MPI.Intracomm, end: float) -> list[int]:
    """Exchange a message with each peer; return peers with incomplete messages at time `end`."""
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
    """Return the numbers in a text formatted by `spans`."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [each for first, last in found for each in range(int(first), int(last or first) + 1)]


def finding(pairs: Iterable[Sequence[int]], hosts: Sequence[str], within: float) -> Finding:
    """Return the Finding for the `pairs` of ranks that cannot reach each other."""
    apart = defaultdict(set)
    for pair in pairs:
        apart[tuple(hosts[rank] or f"rank {rank}" for rank in pair)].update(pair)
    listed = "; ".join(
        f"{' and '.join(where)} (ranks {spans(sorted(ranks))})"
        for where, ranks in sorted(apart.items())
    )
    return Finding(FAIL, "meeting", f"no message in {within:g} s between {listed}", _REMEDY)


def _announce(hosts: Sequence[str]) -> None:
    """Print a notice, because MPI may end the job at its first message, and MPI's own message
    names neither the hosts nor the remedy."""
    between = ", ".join(dict.fromkeys(filter(None, hosts)))
    line = f"testing messages between {between}; if MPI ends the job now, {_REMEDY}"
    print("hpc3d.doctor: " + " ".join(line.split()), file=sys.stderr, flush=True)
    time.sleep(_SPOKEN)


def end(code: int) -> None:
    """End all ranks."""
    MPI.COMM_WORLD.Abort(code)
