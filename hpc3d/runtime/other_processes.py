"""CPU time that other processes used on the hosts of a run, which shows how busy the hosts were.

The first rank of each host reads the CPU time of all processes from /proc/stat at the start and at
the end of the training steps. The CPU time of the ranks on the host is subtracted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # columns idle and iowait
_COUNTED = 8  # columns user to steal; guest time is included in user time
_SHORTEST = 1.0  # minimum CPU time of a host in s, as its counters advance in steps of 10 ms


class CpuTimes(NamedTuple):
    """CPU times in s.

    `own` is the time of this process, `busy` that of all processes on the host, and `total` also
    includes the idle time of the host. If the times of the host are unknown, they are 0.
    """

    own: float
    busy: float = 0.0
    total: float = 0.0


def cpu_times(is_first: bool) -> CpuTimes:
    """Return the CPU times so far. Only the first rank of a host reads the times of the host."""
    own = time.process_time()
    if is_first:
        with suppress(OSError, ValueError, IndexError):
            columns = [int(word) for word in _STAT.read_text().split()[1 : 1 + _COUNTED]]
            total, tick = sum(columns), os.sysconf("SC_CLK_TCK")
            return CpuTimes(own, (total - sum(columns[_IDLE])) / tick, total / tick)
    return CpuTimes(own)


def share_of_others(hosts: Sequence[Hashable], spent: Sequence[CpuTimes]) -> float | None:
    """Return the share of the CPU time that other processes used, on the host with most of them.

    The share refers to all cores of the host. The result is `None` if it is unknown.

    Parameters
    ----------
    hosts
        Host of each rank.
    spent
        CPU times of each rank during the run; those of the host are known on its first rank.
    """
    shares = []
    for host in {*hosts}:
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        first, own = spent[ranks[0]], sum(spent[rank].own for rank in ranks)
        if first.total >= _SHORTEST:
            shares.append(min(1.0, max(0.0, first.busy - own) / first.total))
    return max(shares, default=None)


class OtherProcesses:
    """Measures the CPU time of other processes from its creation until `share` is called."""

    def __init__(self, job: Job) -> None:
        self.job, self.host = job, job.kernels[job.rank]
        self.is_first = job.kernels.index(self.host) == job.rank
        self.begin = cpu_times(self.is_first)

    def share(self) -> float | None:
        """Return the share of the CPU time (`share_of_others`). This is a collective call."""
        now = cpu_times(self.is_first)
        spent = CpuTimes(*(end - begin for end, begin in zip(now, self.begin, strict=True)))
        hosts, all_spent = zip(*self.job.gather((self.host, spent)), strict=True)
        return share_of_others(hosts, all_spent)
