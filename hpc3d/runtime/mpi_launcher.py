"""Start ranks with the launcher that belongs to the MPI library of mpi4py."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpc3d.console import command_line
from hpc3d.console.exit_codes import STOPPED
from hpc3d.console.sanitize import counted
from hpc3d.runtime import environment, host_memory, launch
from hpc3d.runtime.fork import fork_or_end
from hpc3d.runtime.mpi_library import CONSENT, CROWD, INSTALL, UNKNOWN, MpiInstall, launcher_at
from hpc3d.runtime.probe import outcome

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

LAUNCH_HELP = "start N ranks on this machine, like mpirun -np N; they may outnumber the cores"
_LEAST_OF_RANK = 32 << 20  # lower bound on the memory of a rank, in bytes
# Names of the launchers of an ABI. Debian adds the name of the MPI if both are installed.
_NAMES = {
    "Open MPI": ("mpirun", "mpirun.openmpi"),
    "MPICH": ("mpirun", "mpirun.mpich", "mpiexec.hydra"),
}
# Pattern of the lines that hpc3d prints to standard error, except progress lines. It also matches
# lines to which the launcher adds a prefix.
SAID = re.compile(r"hpc3d\.\w+: (?!\d+ s: )(.*)")
_RULER = "-" * 74 + "\n"  # line above and below each message of Open MPI's mpirun
# Messages of mpirun about an exit code, and the errors that it sometimes prints afterwards.
_EXIT_REPORT = re.compile(
    r'exited with non-zero status|MPI_ABORT was invoked|calling\s+"abort"|\] PMIX ERROR: '
)
_STOP_REPORT = re.compile(rf"Exit code: +{STOPPED}\n")  # the log of the run states the reason
_FIND = "from hpc3d.runtime import mpi_library; print(*mpi_library.found() or (), sep='\\n')"


def run(
    verb: str,
    words: list[str],
    body: Callable[[Job], int | None],
    wanted: Callable[[], int],
    check: Callable[[int], Any] | None = None,
) -> int:
    """Run `body(job)` on the ranks that have been started, or that `--launch N` requests.

    `words` are the arguments of the command `verb`. If they contain the option, `wanted()` removes
    it and returns N. `check(N)` raises ValueError if the other arguments are invalid, before any
    rank starts.
    """
    if command_line.has_option(words, "--launch"):
        if environment.number_in(environment.OWN_RANK, default=0):
            return 0  # the launcher would kill rank 0 before it reports that --launch is wrong
        start = partial(_start_ranks, verb, words, wanted, check)
        if code := command_line.run(verb, start, patient=False):
            return code
    return launch.run(verb, body)


def _start_ranks(
    verb: str,
    words: list[str],
    wanted: Callable[[], int],
    check: Callable[[int], Any] | None,
) -> None:
    """Replace this process by the launcher of the ranks that `--launch N` in `words` requests.

    The function returns if this process can continue as the only rank.

    Raises
    ------
    ValueError
        If N is not a number of ranks, or this machine has too little memory for them, or a
        launcher has already started ranks or is missing, or the other options are invalid.
    """
    ranks = wanted()
    started = environment.number_in(environment.WORLD_RANKS[:3], default=1)
    if started > 1:
        raise ValueError(
            f"--launch {ranks}: a launcher has already started {started} ranks; use either "
            "mpirun -np N or --launch N"
        )
    most = host_memory.total() // _LEAST_OF_RANK
    if ranks > most:
        raise ValueError(
            f"--launch {ranks}: the memory of this machine suffices for at most "
            f"{counted(most, 'rank')}; use fewer ranks, or mpirun with the hosts of a cluster"
        )
    if command := launch_command(ranks):
        if check:
            check(ranks)
        filter_standard_error()
        command += [sys.executable, "-m", f"hpc3d.{verb}", *words]
        os.execve(command[0], command, {**launch_settings(), **os.environ})


def launch_settings() -> dict[str, str]:
    """Return environment variables that permit the root user, and more ranks than cores."""
    return dict.fromkeys(CONSENT, "1") | CROWD


def launch_command(ranks: int) -> list[str]:
    """Return the command that starts `ranks` ranks on this machine; one rank needs none.

    Raises
    ------
    ValueError
        If `ranks` is not a positive integer, mpi4py loads no MPI library, or no launcher belongs
        to this library.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks = {ranks!r}: must be a positive integer")
    if ranks == 1:
        return []
    loaded = _library()
    if loaded is None:
        remedy = "; ".join(INSTALL.splitlines())
        raise ValueError(f"ranks = {ranks}: mpi4py finds no MPI library; {remedy}")
    if path := _best(loaded):
        return [path, "-np", str(ranks)]
    raise ValueError(
        f"ranks = {ranks}: no mpirun belongs to {loaded.maker} {loaded.version}, the MPI "
        f"library of mpi4py ({loaded.path}); put its mpirun on PATH, run pip install "
        "'hpc3d[mpi]', or use 1 rank"
    )


def filter_standard_error() -> None:
    """Redirect the standard error of this process to a child process that filters it.

    The caller then replaces this process by mpirun. The child omits mpirun's messages about the
    exit code of a rank if hpc3d has printed the reason. It exits when mpirun and its ranks have
    closed standard error.
    """
    reader, writer = os.pipe()
    if fork_or_end():
        os.dup2(writer, 2)
        return
    os.setsid()  # Ctrl-C ends mpirun, which prints further messages
    os.close(writer)
    how = {"encoding": "utf-8", "errors": "surrogateescape", "newline": "\n"}
    with suppress(OSError), open(reader, **how) as lines, open(2, "w", **how) as output:
        _forward(lines, output)
    os._exit(0)


def _forward(lines: Iterable[str], output: TextIO) -> None:
    """Copy the standard error of mpirun to `output` without exit reports that hpc3d has explained.

    The exit reports are copied at the end if no line of hpc3d explains them.
    """
    reports, explained = "", False
    for text in _messages(lines):
        explained = explained or bool(SAID.search(text) or _STOP_REPORT.search(text))
        if _EXIT_REPORT.search(text) and not SAID.search(text):
            reports += text
        else:
            print(text, end="", file=output, flush=True)
    if not explained:
        print(reports, end="", file=output)


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """Yield each message of mpirun between two rulers as one text, and each other line."""
    message = ""
    for line in lines:
        line = line.replace("\0", "")  # mpirun terminates some messages with NUL
        message += line
        if not message.startswith(_RULER) or (line == _RULER and message != line):
            yield message
            message = ""
    yield message


def _best(loaded: MpiInstall) -> str | None:
    """Return the launcher of the same MPI and version, otherwise one of the same MPI.

    The last resort is a launcher that names no known MPI, such as a script of the site.
    """
    same = unnamed = None
    for path in _candidates(loaded):
        found = launcher_at(path)
        if found.maker == UNKNOWN:
            unnamed = unnamed or path
        elif found.abi == loaded.abi:
            if found.version == loaded.version:
                return path
            same = same or path
    return same or unnamed


def _library() -> MpiInstall | None:
    """Return the MPI library that mpi4py loads, or None.

    Another process loads it, because a program that imports mpi4py later, such as a notebook,
    could no longer decide how MPI is initialized.
    """
    _, printed = outcome([sys.executable, "-c", _FIND], 60)
    fields = printed.splitlines()[-3:]
    return MpiInstall(*fields) if len(fields) == 3 else None


def _candidates(loaded: MpiInstall) -> Iterator[str]:
    """Yield the launchers on PATH, next to the MPI library, and next to this Python."""
    folders = [None, str(Path(sys.executable).parent)]
    if loaded.path and len(Path(loaded.path).parents) > 1:
        folders.insert(1, str(Path(loaded.path).parents[1] / "bin"))
    names = [(name, folder) for folder in folders for name in _NAMES[loaded.abi]]
    for path in dict.fromkeys(shutil.which(name, path=folder) for name, folder in names):
        if path:
            yield path
