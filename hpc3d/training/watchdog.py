"""Watchdog that ends a stalled job after every responsive rank has reported its position.

    RUN/watchdog/rank-00003.txt    the call in which rank 3 waits, the calls of all its groups, and
                                   the stacks of its threads
    RUN/watchdog/summary.txt       the line printed by one of the ranks

A thread on every rank checks, several times per `run.watchdog_s` seconds, whether a call was
completed, a step began or memory was allocated. The thread only reads existing counters, so it
does not slow down training.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from hpc3d.comm.mesh import WORLD, along
from hpc3d.console.exit_codes import STALLED
from hpc3d.console.sanitize import counted
from hpc3d.runtime.host_map import spans
from hpc3d.runtime.launch import leave, save_in_child
from hpc3d.runtime.launcher import end_later, launcher
from hpc3d.runtime.stop_request import ENDING

if TYPE_CHECKING:
    from hpc3d.comm.communicator import Communicator
    from hpc3d.comm.mesh import Mesh
    from hpc3d.runtime.host_map import Homes
    from hpc3d.runtime.job import Job

_LOOKS = 20  # number of checks per time limit (at least one check per second)
GRACE = 6  # number of additional checks, to give the other ranks time to report
LATER = 6  # extra checks on other nodes, so that rank 0's node ends the job and prints the summary
TOLD = 10  # minimum time in seconds after SIGTERM before a rank assumes that its peers exited
_SILENT = "silent: stopped or terminated"
ANSWER = 2  # timeout in seconds for file operations: the file server may be unreachable
_SHOWN = 6  # maximum number of rank groups in the printed line


class Watchdog:
    """Watchdog that ends a job with exit code STALLED if this rank makes no progress.

    The time limit is `seconds`. `mesh` is the untraced mesh, whose communicators count their
    calls. `homes` contains the node of each rank. After SIGTERM, a rank whose peers no longer
    respond exits before the time limit.
    """

    def __init__(self, job: Job, mesh: Mesh, run_dir: Path, seconds: float, homes: Homes) -> None:
        self.job, self.pool = job, mesh.pool
        self.position = RankPosition({**mesh.comms, WORLD: mesh.world})
        self.reports = Reports(job, run_dir / "watchdog", homes)
        self.grace = GRACE if homes.nodes[job.rank] == homes.nodes[0] else GRACE + LATER
        self.leads = homes.nodes[job.rank] == job.rank
        self.seconds, self.period = seconds, min(1.0, seconds / _LOOKS)
        self.silence = self.longest = 0.0  # time without progress in s: current and longest
        self.moved: object = None
        self.looked = time.monotonic()
        self.over, self.thread = Event(), Thread(target=self.watch, daemon=True)

    def step(self, number: int) -> None:
        """Record that step `number` begins; the first call starts the watchdog thread."""
        self.position.step = number
        if not self.thread.ident:
            self.thread.start()

    def stop(self) -> None:
        self.over.set()

    def watch(self) -> None:
        while not self.over.wait(self.period):
            self.look()
            self.act()

    def look(self) -> None:
        """Update the number of seconds without progress.

        Time during which this thread could not run is not counted, because the whole process was
        suspended or waited for a core.
        """
        before, self.moved = self.moved, self._movement()
        gap, self.looked = time.monotonic() - self.looked, time.monotonic()
        if self.moved == before:
            self.silence += min(gap, 2 * self.period)
        else:
            self.silence, self.longest = 0.0, max(self.longest, self.silence)

    def _movement(self) -> tuple[object, ...]:
        """Return counters that change between checks while the rank makes progress."""
        return self.position.done(), self.pool.live["activation"], len(self.job.signals)

    def act(self) -> None:
        """Report the position or end the job if this rank has made no progress for too long.

        A rank reports after `seconds` without progress, or after half this time if another rank
        has reported. It ends the job once the other ranks have had time to report.
        """
        if self._deserted():
            self.leave()
        elif self.silence > self.seconds + self.grace * self.period:
            self.end()
        elif self.silence > self.seconds or self._suspected():
            self.reports.speak(self.position, self.silence)
        elif self.silence == 0:
            self.reports.take_back()

    def _suspected(self) -> bool:
        return self.silence > self.seconds / 2 and self.reports.begun()

    def _deserted(self) -> bool:
        """Return True if this rank was asked to exit, but is waiting for ranks that seem gone."""
        told = {*ENDING} & {*self.job.signals} and self.position.waiting()
        return bool(told) and self.silence > max(TOLD, 2 * self.longest)

    def leave(self) -> None:
        """End this rank's process, without ending the job."""
        if self.job.first_to_fail():
            what = f"asked to stop and exited: no progress for {self.silence:.0f} s"
            self.job.complain(f"rank {self.job.rank} was {what}, {self.position}")
        leave(self.job)

    def end(self) -> None:
        """Save the state and end the job, unless it is already ending; one rank reports why."""
        if self.job.ending.acquire(blocking=False):
            save_in_child(self.job)
            if self.reports.sum_up(self.seconds):
                self.job.abort(STALLED)
            if self.leads:
                end_later(launcher())
            time.sleep(3)
            os._exit(STALLED)


class RankPosition:
    """Position of a rank: its `step`, and the call on one of `comms` in which the rank waits."""

    def __init__(self, comms: Mapping[str, Communicator]) -> None:
        self.comms, self.step = comms, -1

    def done(self) -> tuple[int, ...]:
        return self.step, *(comm.done for comm in self.comms.values())

    def waiting(self) -> tuple[str, tuple[str, int, int, int | None]] | None:
        """Return the axis and the call in which this rank waits, or `None`."""
        calls = ((axis, comm.waiting) for axis, comm in self.comms.items())
        return next(((axis, call) for axis, call in calls if call), None)

    def __str__(self) -> str:
        call = self.waiting()
        if not call:
            what = "computing, or waiting for a device or file"
            return f"outside communication in step {self.step}: {what}"
        axis, (op, number, nbytes, peer) = call
        other = "" if peer is None else f" with rank {self.comms[axis].members[peer]}"
        size = f", {counted(nbytes, 'byte')}" if nbytes else ""
        return f"in {op}{other} {along(axis)} (call {number}{size}) of step {self.step}"

    def groups(self) -> Iterator[str]:
        """For each communicator of this rank, yield a line with its members and call counts."""
        for axis, comm in self.comms.items():
            calls = f"{counted(comm.calls, 'call')}, {comm.done} done"
            yield f"{axis}: ranks {spans(comm.members)}: {calls}"


class Reports:
    """Position reports of all ranks of a job, stored in `folder` as one file per rank."""

    def __init__(self, job: Job, folder: Path, homes: Homes) -> None:
        self.job, self.folder, self.homes, self.spoken = job, folder, homes, False
        self.summary = folder / "summary.txt"
        self.asked: Thread | None = None

    def _promptly(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        """Return the result of `ask()`, or `otherwise` if the file system does not respond."""
        if self.asked and self.asked.is_alive():
            return otherwise
        found = [otherwise]
        self.asked = Thread(target=lambda: found.insert(0, ask()), daemon=True)
        self.asked.start()
        self.asked.join(ANSWER)
        return found[0]

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.txt"

    def begun(self) -> bool:
        """Return True if any rank has reported."""
        return self._promptly(self.folder.is_dir, False)

    def speak(self, position: RankPosition, silence: float) -> None:
        """Write the report of this rank, unless it has already been written."""
        if not self.spoken:
            self.spoken = True
            self._promptly(lambda: self.write(position, silence), None)

    def write(self, position: RankPosition, silence: float) -> None:
        with suppress(OSError):  # a full disk must not keep the job from ending
            self.folder.mkdir(exist_ok=True)
            with self.path(self.job.rank).open("w") as file:
                lines = [position, f"for {silence:.1f} s", *position.groups(), ""]
                print(*lines, sep="\n", file=file, flush=True)
                faulthandler.dump_traceback(file)

    def take_back(self) -> None:
        """Remove the report of this rank, because it has made progress again.

        The report is kept if the job is ending, because ending a job also resumes suspended ranks.
        """
        if self.spoken and self._promptly(lambda: not self.summary.exists(), False):
            self.spoken = False
            with suppress(OSError):
                self.path(self.job.rank).unlink()
                self.folder.rmdir()

    def sum_up(self, seconds: float) -> bool:
        """Print the positions of all ranks; return False if another rank has printed them."""
        line = f"no progress for {seconds:g} s: "
        if positions := self._promptly(self.positions, None):
            line += f"{positions}; stacks in {self.folder}"
        else:
            line += f"{self.folder} does not respond either"
        if not self._promptly(lambda: self.noted(line), True):
            return False
        self.job.first_to_fail()  # the job ends; the other ranks need not report their exit
        self.job.complain(line)
        return True

    def noted(self, line: str) -> bool:
        """Write the summary; return False if another rank has already written it."""
        try:
            with self.summary.open("x") as file:
                print(line, file=file)
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def positions(self) -> str:
        """Return the ranks' positions, starting with the ranks that may be blocking the others."""
        positions: dict[str, list[int]] = {}
        for rank in range(self.job.size):
            positions.setdefault(self.said(rank), []).append(rank)
        found = sorted(positions.items(), key=lambda item: (_suspicion(item[0]), -len(item[1])))
        parts = [f"{self.homes.named(ranks)} {where}" for where, ranks in found]
        if len(parts) > _SHOWN:
            parts[_SHOWN - 1 :] = [f"{len(parts) - _SHOWN + 1} other positions"]
        return "; ".join(parts)

    def said(self, rank: int) -> str:
        """Return the position that a rank has reported."""
        try:
            return self.path(rank).read_text().partition("\n")[0]
        except OSError:
            return _SILENT


def _suspicion(where: str) -> int:
    """Return a rank's sort key: 0 if silent, 1 if outside any call, 2 if in a call."""
    return 0 if where == _SILENT else 1 + ("(call" in where)
