"""Check this machine, its MPI installation and its disks; report problems and fixes.

    python -m hpc3d.doctor                       # check this machine, and start two test ranks
    mpirun -np N python -m hpc3d.doctor          # check hosts, versions and messages of N ranks
    srun --mpi=pmix python -m hpc3d.doctor       # the same in a Slurm job

Each finding is one line: ok, warn (training works, but slowly or with a risk) or FAIL (training
does not work). The fix is printed below each problem. Nothing is changed, and no file remains in
the results folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpc3d.comm import cuda_aware_probe, transport
from hpc3d.config.argument_types import real
from hpc3d.console.command_line import Parser, run
from hpc3d.console.exit_codes import CHECK_FAILED, JobExit
from hpc3d.diagnose import node_checks, storage_checks
from hpc3d.runtime import environment, launch, mpi_library
from hpc3d.runtime.finding import FAIL, OK, WARN, Finding, examine
from hpc3d.runtime.mpi_launcher import launch_settings
from hpc3d.runtime.probe import outcome

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.runtime.job import Job
    from hpc3d.trace.clock import Clocks

_EXITS = "exit codes: 0 no check failed, 2 invalid input, 3 a check failed"
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK")
_JSON = """\
print one JSON object on the last line, with the keys verdict (the worst one) and findings (a list
of objects with the keys verdict, subject, text, remedy, and printed (the output of a program))"""
# Maps a part of a launcher's error message to the remedy.
_SAID = {
    "as root": f"run export {mpi_library.CONSENT[0]}=1 {mpi_library.CONSENT[1]}=1",
    "not enough slots": "use mpirun --oversubscribe; in a job, request more tasks",
    "cannot load MPI library": mpi_library.INSTALL,
    "cannot open shared object": "load the modules that were loaded when hpc3d was installed",
    "No module named": "in the source folder, run python -m pip install -e . with this Python",
    "No space left": "free up space in $TMPDIR (default: /tmp), or set TMPDIR to another folder",
    "listener thread failed to start": "remove ompi.* folders of killed jobs from TMPDIR or /tmp",
    "PMI": "use the mpirun of the same MPI library, or srun with a type from srun --mpi=list",
}
_ONE_RANK = """\
from hpc3d.runtime.environment import mpi_environment
with mpi_environment():
    from mpi4py import MPI
"""
_BY_HAND = "for more output, run mpirun -np 2 python -m hpc3d.doctor"
_SHOWN = 8  # maximum number of output lines of a failed command to print
_CLOCKS_APART = 1  # largest acceptable clock difference between hosts in s
_INSTALL_H5PY = "if the error mentions an HDF5 filter, reinstall h5py from its wheel on PyPI"
_HANGS = """\
select an interface that all hosts can use: --mca btl_tcp_if_include NAME (Open MPI), FI_TCP_IFACE
(MPICH); or check that the host name has an address: getent hosts $(hostname)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print the findings; return 3 if a check fails."""
    ours = parser()
    options = ours.parse_args(argv)
    if not _started():
        if options.together:
            ours.error(
                "--together requires a launcher: mpirun -np N python -m hpc3d.doctor --together"
            )
        return run("doctor", lambda: _conclude(told(_alone(options)), options))
    environment.set_environment()
    meant = environment.number_in(environment.WORLD_RANKS, default=1)
    mpi = mpi_library.found()
    if mpi is None or mpi_library.started_by_other_mpi(mpi) or mpi_library.world() == 1 < meant:
        if environment.number_in(environment.OWN_RANK, default=0):
            return 0  # a nonzero code would make the launcher kill rank 0 before it prints
        return _conclude(told(_lonely(options, meant)), options)
    from hpc3d.diagnose import meeting

    if found := meeting.meet():  # some ranks cannot reach each other
        meeting.end(_conclude(told([found]), options))
    return launch.run("doctor", lambda job: _meet(job, options))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("doctor", __doc__, _EXITS)
    add = parser.add_argument
    text = "folder in which runs are created (default: results)"
    add("--out", type=Path, default="results", metavar="DIR", help=text)
    text = "under a launcher: run only the checks that involve all ranks"
    add("--together", action="store_true", help=text)
    text = "timeout in seconds for the processes that this command starts (default: 60)"
    seconds = real(lambda s: 0 < s < 3600, "must be a number of seconds between 0 and 3600")
    add("--timeout", type=seconds, default=60, metavar="SECONDS", help=text)
    add("--json", action="store_true", help=_JSON)
    return parser


def _started() -> bool:
    """Return True if an MPI launcher, not a shell or a batch script, started this process."""
    step = environment.number_in(("SLURM_STEP_NUM_TASKS",), default=1)
    return step > 1 or any(name in os.environ for name in _STARTED)


def told(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding as soon as it is available, and return all of them."""
    found = []
    for finding in findings:
        found.append(finding)
        print(*finding.lines(), sep="\n", flush=True)
    return found


def _conclude(found: Sequence[Finding], options: Namespace) -> int:
    """Print the number of findings per verdict; return the exit code."""
    verdicts = [finding.verdict for finding in found]
    counts = {verdict: verdicts.count(verdict) for verdict in (FAIL, WARN, OK)}
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()), flush=True)
    if options.json:
        worst = next((verdict for verdict, number in counts.items() if number), OK)
        rows = [finding._asdict() for finding in found]
        print(json.dumps({"verdict": worst, "findings": rows}), flush=True)
    return CHECK_FAILED if counts[FAIL] else 0


def _alone(options: Namespace) -> Iterator[Finding]:
    """Check this process, which was started without a launcher; then start and check two ranks."""
    yield from _local(options)
    mpi, launcher = mpi_library.found(), mpi_library.on_path()
    if mpi is None:
        return
    yield from examine(mpi_library.mpirun, mpi, launcher)
    yield from examine(mpi_library.slurm, mpi)
    yield from examine(one_rank, options)
    if launcher is None:
        yield Finding(WARN, "2 ranks", "not checked, because mpirun was not found")
        return
    yield from examine(two_ranks, launcher.path, options)
    if cuda_aware_probe.present():
        yield from examine(cuda_aware_probe.aware, launcher.path, options.timeout)


def _local(options: Namespace) -> Iterator[Finding]:
    """Run the checks that need only one process."""
    ranks = environment.number_in(environment.LOCAL_RANKS, default=1)
    most = max(ranks, environment.cores_of_node())
    yield from node_checks.python()
    yield from examine(node_checks.packages)
    yield from examine(node_checks.threads, ranks)
    yield from examine(node_checks.limits, most)
    yield from examine(storage_checks.storage, options.out)
    yield from examine(hdf5, options.out)
    yield from examine(cuda_aware_probe.devices)
    yield from examine(mpi_library.library)
    if mpi_library.found():
        yield from examine(node_checks.shared_memory, most)


def hdf5(folder: Path) -> Iterator[Finding]:
    """Check that HDF5 can write and read a compressed trace table in the output folder."""
    import numpy as np

    from hpc3d.trace.file import create, open_file, write_table
    from hpc3d.trace.schema import CLOCK_SAMPLES, record_type

    rows = np.zeros(1000, record_type(CLOCK_SAMPLES))
    rows["t_local"] = np.arange(1000)
    try:
        there = storage_checks.scratch(folder)
    except OSError:  # already reported by `storage`
        return
    try:
        with there as name:
            path = Path(name, "trace.h5")
            with create(path) as (file, _):
                write_table(file, "clock/samples", CLOCK_SAMPLES, rows)
            with open_file(path) as file:
                right = np.array_equal(file["clock/samples/t_local"], rows["t_local"])
    except (OSError, ValueError) as error:
        yield Finding(FAIL, "HDF5", f"{folder}: {error}".partition("\n")[0], _INSTALL_H5PY)
        return
    text = f"a compressed table was written and read in {folder}"
    if right:
        yield Finding(OK, "HDF5", text)
    else:
        yield Finding(FAIL, "HDF5", f"{text}, with wrong values", _INSTALL_H5PY)


def one_rank(options: Namespace) -> Iterator[Finding]:
    """Check that MPI initializes in a process without a launcher."""
    code, printed = outcome([sys.executable, "-c", _ONE_RANK], options.timeout)
    if code == 0:
        yield Finding(OK, "1 rank", "starts without mpirun")
    else:
        yield not_started("1 rank", "python", code, printed, options.timeout)


def two_ranks(mpirun: str, options: Namespace) -> Iterator[Finding]:
    """Start two ranks and yield their findings, or a finding that explains why they failed."""
    words = ["-m", "hpc3d.doctor", "--together", "--json", "--out", options.out]
    command = [mpirun, "-np", "2", sys.executable, *words]
    code, printed = outcome(command, options.timeout, **launch_settings())
    results = [line for line in printed.splitlines() if line.startswith('{"verdict"')]
    if len(results) != 1 or code not in (0, CHECK_FAILED):
        yield not_started("2 ranks", "mpirun -np 2", code, printed, options.timeout)
        return
    for row in json.loads(results[0])["findings"]:
        yield Finding(**row | {"subject": f"2 ranks, {row['subject']}"})


def not_started(
    subject: str, command: str, code: int | None, printed: str, timeout: float
) -> Finding:
    """Return a finding for ranks that failed or timed out, with their output and a remedy."""
    said = [line.strip() for line in printed.split("\n") if re.search("[a-z]", line)]
    if code is None:
        text, remedy = f"no more output within {timeout:g} s", _HANGS
    else:
        text = f"{command} ended with exit code {code}"
        remedy = next((_SAID[words] for words in _SAID if words in printed), _BY_HAND)
    return Finding(FAIL, subject, text, remedy, tuple(said[-_SHOWN:]))


def _lonely(options: Namespace, meant: int) -> Iterator[Finding]:
    """Check this process, and explain why the launcher's processes became MPI singletons.

    An MPI singleton is a process that MPI did not connect to the other processes of the launcher.
    `meant` is the number of processes that should have formed one job.
    """
    if not options.together:
        yield from _local(options)
    mpi = mpi_library.found()
    yield from [mpi_library.why_singletons(meant, mpi)] if mpi else mpi_library.library()


def _meet(job: Job, options: Namespace) -> NoReturn:
    """Run the collective checks, print the findings on rank 0, and exit on all ranks."""
    findings = together(job, options)
    found = told(findings) if job.rank == 0 else list(findings)
    raise JobExit(job.comm.bcast(_conclude(found, options) if job.rank == 0 else None))


def together(job: Job, options: Namespace) -> Iterator[Finding]:
    """Run the single-process checks on rank 0, and then the collective checks on all ranks."""
    from hpc3d.diagnose import job_checks

    if job.rank == 0 and not options.together:
        yield from _local(options)
    job.barrier()
    launch.watch(options.timeout)
    yield from job_checks.report_hosts(job)
    yield from job_checks.alike(job)
    yield from job_checks.one_folder(job, options.out)
    yield from job_checks.sums(job)
    yield from job_checks.transport(job)
    yield from job_checks.link(job)
    yield from clocks(job)
    yield from cuda_aware_probe.device_map(job)
    yield from transport.explained(job)
    launch.unwatch()


def clocks(job: Job) -> Iterator[Finding]:
    """Check that the wall clocks of all hosts, which timestamp files and logs, agree."""
    from hpc3d.comm.cartesian import build
    from hpc3d.trace.clock import Clocks

    nodes = job.homes().nodes
    if len(set(nodes)) == 1:
        return
    world = build({"x": job.size}, job.comm, transport="mpi").world
    compared = Clocks(world, nodes, time.time_ns)
    ahead = apart(compared, job.gather(compared.synchronize()))
    text = f"{len(ahead)} hosts differ from rank 0's host by at most {max(map(abs, ahead)):.3g} s"
    if max(map(abs, ahead)) < _CLOCKS_APART:
        yield Finding(OK, "clocks", text)
    else:
        remedy = "synchronize them with chrony or ntpd; traces are correct in any case"
        yield Finding(WARN, "clocks", text, remedy)


def apart(compared: Clocks, samples: Sequence[Any]) -> list[float]:
    """Return the offset of each host's clock from the clock of rank 0's host, in seconds.

    A positive offset means that the host's clock is ahead. `samples` has the clock samples of each
    rank.
    """
    from hpc3d.trace.clock import as_rows, knot, parent

    ahead = [0.0]
    for index, leader in list(enumerate(compared.leaders))[1:]:
        _, offset, _ = knot(as_rows(samples[leader]))
        ahead.append(ahead[parent(index)] - float(offset) / 1e9)
    return ahead


if __name__ == "__main__":
    sys.exit(main())
