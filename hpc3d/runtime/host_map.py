"""Map ranks to nodes, and format ranks and host names for messages.

All ranks on a node share one kernel and one clock.  Nodes are not identified by host name, because
two machines or two containers may have the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BOOT = Path("/proc/sys/kernel/random/boot_id")
CLOCKS = "/proc/self/ns/time"
_DEVICES = Path("/sys/class")
# Device classes of networks with remote memory access: InfiniBand, RoCE and EFA; Slingshot;
# Omni-Path.
_REMOTE = ("infiniband", "cxi", "hfi1")


def has_remote_memory_access() -> bool:
    """Return True if this host has a network interface with remote memory access."""
    return any(any((_DEVICES / name).glob("*")) for name in _REMOTE)


def kernel() -> tuple[str, str]:
    """Return the boot ID and the time namespace, which identify the clock that a rank reads."""
    boot = clocks = ""
    with suppress(OSError):
        boot = BOOT.read_text(encoding="ascii").strip()
    with suppress(OSError):
        clocks = os.readlink(CLOCKS)
    return boot, clocks


def namesakes(kernels: Iterable[tuple[str, tuple[str, str]]]) -> str | None:
    """Return an error message if several hosts have the same name, otherwise `None`.

    `kernels` has one pair (host name, `kernel()`) per rank.
    """
    ranks = {}
    for rank, each in enumerate(kernels):
        ranks.setdefault(each, []).append(rank)
    named = [host for host, _ in ranks]
    for name in named:
        if named.count(name) > 1:
            who = listed([spans(found) for (host, _), found in ranks.items() if host == name])
            return (
                f"ranks {who} are on different hosts that are all named {name}: Open MPI "
                "treats them as one host and hangs; give each host a unique name"
            )
    return None


def spans(ranks: Iterable[int]) -> str:
    """Format ascending rank numbers as ranges, such as 0-2 4-7."""
    runs = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank,))
    return " ".join("-".join(map(str, run)) for run in runs)


class Homes(NamedTuple):
    """Host names and nodes of all ranks. A node is identified by its lowest rank."""

    hosts: list
    nodes: list

    def several(self) -> bool:
        return len(set(self.nodes)) > 1

    def leaders(self) -> list[int]:
        """Return the lowest rank on each node."""
        return list(dict.fromkeys(self.nodes))

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, home in enumerate(self.nodes) if home == node]

    def named(self, ranks: Sequence[int]) -> str:
        """Format ascending ranks with their host names for a message.

        Examples: "all of hn2", "rank 3 (hn1)", "ranks 2-3 (hn1) and 4 (hn2)".  The host is omitted
        if the job uses only one node.
        """
        if not self.several():
            return f"rank{'s'[: len(ranks) > 1]} {spans(ranks)}"
        here = {self.nodes[rank]: [] for rank in ranks}
        for rank in ranks:
            here[self.nodes[rank]].append(rank)
        whole = [node for node in here if here[node] == self.ranks(node) and here[node][1:]]
        parts = [node for node in here if node not in whole]
        found = [f"all of {listed([self.hosts[node] for node in whole])}"] if whole else []
        if parts:
            word = f"rank{'s'[: sum(len(here[node]) for node in parts) > 1]}"
            found.append(
                f"{word} {listed([f'{spans(here[node])} ({self.hosts[node]})' for node in parts])}"
            )
        return " and ".join(found)


def listed(words: Sequence[str]) -> str:
    """Join strings into an English list: a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
