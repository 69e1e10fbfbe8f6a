"""MPI job: collective calls before the mesh exists, and coordinated exit of all ranks."""

from __future__ import annotations

import errno
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from mpi4py import MPI

from hpc3d.console.exit_codes import BAD_INPUT, REFUSED, JobExit
from hpc3d.console.sanitize import lines_of, sanitized
from hpc3d.runtime.host_map import Homes, kernel, namesakes
from hpc3d.runtime.launcher import end_later, keep_open, launcher

_UNHEARD = 5  # timeout in s for the launcher to end the job after MPI_Abort
_REPORTED = 5  # timeout in s for the first rank that fails to print its message


class Job:
    """All ranks of an MPI job.

    Attributes
    ----------
    exit_hooks
        Functions to call before the job ends, successfully or not.
    started
        Start time of this rank, a value of `time.monotonic` in s.
    signals
        Signals received so far.  The first signal that is in `requests` asks the job to stop.
    """

    def __init__(self, name: str, started: float) -> None:
        if not MPI.Is_initialized():  # `mpi_library.found` imports MPI without initializing it
            MPI.Init_thread()
        self.name, self.comm = name, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.exit_hooks, self.ending = [], threading.Lock()
        self.failure: socket.socket | None = None
        self.signals, self.requests, self.started = [], set(), started
        self.kernels = self.gather((socket.gethostname(), kernel()))
        self.id = self.comm.bcast(f"{self.kernels[0][0]}-{os.getpid()}")

    def namesakes(self) -> str | None:
        """Return an error message if several hosts have the same name, otherwise `None`.

        Open MPI treats such hosts as one host, so the next collective call would deadlock.
        """
        return namesakes(self.kernels) if "Open MPI" in self.library() else None

    def from_root(self, function: Callable[[], Any]) -> Any:
        """Call `function()` on rank 0 and return its value on all ranks.

        If `function` raises an exception listed in REFUSED, rank 0 prints its message and all
        ranks exit.
        """
        return self.comm.bcast(self.on_root(function))

    def on_root(self, function: Callable[[], Any]) -> Any:
        """Call `function()` on rank 0 and return its value there; return `None` on other ranks.

        If `function` raises an exception listed in REFUSED, rank 0 prints its message and all
        ranks exit.
        """
        value, problems = None, ()
        if self.rank == 0:
            try:
                with self.progress():
                    value = function()
            except REFUSED as error:
                problems = lines_of(error)
        if problems := self.comm.bcast(problems):
            self.refuse(*problems)
        return value

    def progress(self, doing: object = "") -> AbstractContextManager[None]:
        """Return a context manager in which rank 0 shows progress.

        The progress line shows the newest log record. If `doing` is given, it is logged first.
        """
        if self.rank:
            return nullcontext()
        from hpc3d.console.progress import progress

        return progress(self.name, doing, since=self.started)

    def on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """Call `function()` on every rank and return its value.

        If `function` raises an exception listed in REFUSED on any rank, all ranks exit, and each
        distinct line of the error messages is printed once.
        """
        value, problems = None, []
        try:
            value = function()
        except REFUSED as error:
            problems = lines_of(error)
        if found := dict.fromkeys(line for lines in self.gather(problems) for line in lines):
            self.refuse(*found)
        return value

    def refuse(self, *problems: str) -> NoReturn:
        """Exit on all ranks, after rank 0 has printed one line per problem."""
        if self.rank == 0:
            for problem in problems:
                self.complain(sanitized(problem))
        raise JobExit(BAD_INPUT)

    def complain(self, text: str) -> None:
        print(f"hpc3d.{self.name}: {text}", file=sys.stderr, flush=True)
        if self.failure:
            self.failure.listen()  # ranks that wait in `first_to_fail` continue

    def scatter_from_root(self, function: Callable[[], Sequence[Any]]) -> Any:
        """Call `function()` on rank 0, scatter the returned list, and return this rank's item."""
        return self.comm.scatter(function() if self.rank == 0 else None)

    def gather(self, value: Any) -> list[Any]:
        """All-gather `value`; return the list of all ranks' values, in rank order."""
        return self.comm.allgather(value)

    def barrier(self) -> None:
        """Wait for all ranks, without busy-waiting, since rank 0 may be seconds behind."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.005)

    def location(self) -> dict[str, Any]:
        """Return a dict with this rank's host name, process ID, local rank and node.

        The node is identified by its lowest rank.  All ranks must call this method.
        """
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        mine = node.bcast(self.rank), MPI.Get_processor_name(), kernel()
        first = self.gather(mine).index(mine)
        own = {"host": socket.gethostname(), "pid": os.getpid()}
        return own | {"local_rank": node.rank, "node": first}

    def homes(self) -> Homes:
        """Return the host names and nodes of all ranks. All ranks must call this method."""
        locations = self.gather(self.location())
        return Homes([each["host"] for each in locations], [each["node"] for each in locations])

    def library(self) -> str:
        """Return the name and version of the MPI library as one line of text."""
        line = MPI.Get_library_version().split(",")[0].split("\n")[0]
        return " ".join(line.split())

    def first_to_fail(self) -> bool:
        """Return True if this rank is the first rank of the job that fails on this host.

        The first failing rank binds an abstract socket address, which leaves no file.  Ranks that
        fail later find it in use until the job has ended.  They wait until the first rank has
        called `complain`, because their abort would kill it before it prints its message.
        """
        address = f"\0hpc3d-{self.id}-failed"
        try:
            failure = socket.socket(socket.AF_UNIX)
            failure.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return True
            _await_listener(failure, address)
            return False
        self.failure = failure
        keep_open(failure.fileno(), launcher())
        return True

    def abort(self, code: int) -> None:
        end_job(code)


def end_job(code: int) -> None:
    """Abort all ranks immediately. If the launcher does not respond, only this rank exits.

    Exit handlers do not run.  The function also works before the `Job` has been created.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if MPI.COMM_WORLD.size == 1:  # there are no other ranks to abort
        os._exit(code)
    end_later(launcher())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # A Python thread could not end this process, because MPI_Abort holds the GIL while it waits.
    faulthandler.dump_traceback_later(_UNHEARD, exit=True, file=nowhere)
    MPI.COMM_WORLD.Abort(code)


def _await_listener(client: socket.socket, address: str) -> None:
    """Wait until a process listens on a socket address, but at most _REPORTED seconds."""
    client.setblocking(False)  # connecting fails with EAGAIN if the backlog is full
    end = time.monotonic() + _REPORTED
    while client.connect_ex(address) == errno.ECONNREFUSED and time.monotonic() < end:
        time.sleep(0.01)
