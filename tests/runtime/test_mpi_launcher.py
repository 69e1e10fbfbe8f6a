"""The launcher belongs to the MPI library of mpi4py, whichever mpirun is first on PATH."""

import subprocess
import sys

import pytest

from hpc3d.library.commands import run_training
from hpc3d.runtime import mpi_launcher
from hpc3d.runtime.mpi_launcher import launch_command
from hpc3d.runtime.mpi_library import MpiInstall
from tests.mpi import ROOT

OPEN_4, OPEN_5 = "mpirun (Open MPI) 4.1.6", "mpirun (Open MPI) 5.0.8"
WRAPPER = "script of the site, version 2.1"
RULER = 74 * "-" + "\n"
EXIT = RULER + "one or more processes exited with non-zero status\n   Exit code:    {}\n" + RULER
ABORT = RULER + "MPI_ABORT was invoked on rank 1\n" + RULER
ABORTED = RULER + 'prterun has exited due to process rank 1 on node a calling\n"abort".\n' + RULER
KILLED = RULER + "process rank 3 exited on signal 9 (Killed).\n" + RULER
WARNING = RULER + "a component of Open MPI was not found\n" + RULER
ERROR, PMIX = "hpc3d.train: mesh: wrong\n", "[vm:7] PMIX ERROR: PMIX_ERR_UNREACH in file a.c\n"
STACK = "hpc3d.train: rank 1 failed\nTraceback\n"
MPICH = "HYDRA build details:\n Version: 4.2.0"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs programs {path: output of --version}, and the library of
    mpi4py with a version and a folder."""

    def install(programs, version="5.0.8", maker="Open MPI", prefix="site"):
        for name, printed in programs.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
            path.chmod(0o755)
        library = MpiInstall(maker, version, str(tmp_path / prefix / "lib" / "libmpi.so.40"))
        monkeypatch.setattr(mpi_launcher, "_library", lambda: library)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python3"))
        monkeypatch.setenv("PATH", str(tmp_path / "path"))
        return tmp_path

    return install


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"path/mpirun": OPEN_5, "site/bin/mpirun": OPEN_5}, "path/mpirun"),
        ({"path/mpirun": OPEN_4, "site/bin/mpirun": OPEN_5}, "site/bin/mpirun"),
        ({"path/mpirun": MPICH, "path/mpirun.openmpi": OPEN_5}, "path/mpirun.openmpi"),
        ({"path/mpirun": MPICH, "python/mpirun": OPEN_5}, "python/mpirun"),
        ({"path/mpirun": MPICH, "python/mpirun": OPEN_4}, "python/mpirun"),
        ({"path/mpirun": WRAPPER, "site/bin/mpirun": OPEN_4}, "site/bin/mpirun"),
        ({"path/mpirun": WRAPPER}, "path/mpirun"),
    ],
)
def test_launcher_of_the_same_library_and_version_is_preferred(programs, chosen, installed):
    folder = installed(programs)
    assert launch_command(3) == [str(folder / chosen), "-np", "3"]


def test_mpich_is_started_by_its_own_launcher(installed):
    folder = installed({"path/mpirun": OPEN_5, "path/mpiexec.hydra": MPICH}, "4.2.0", "MPICH")
    assert launch_command(2) == [str(folder / "path/mpiexec.hydra"), "-np", "2"]


@pytest.mark.parametrize("programs", [{}, {"path/mpirun": MPICH}])
def test_launcher_of_another_mpi_is_refused_in_one_line(programs, installed):
    installed(programs)
    with pytest.raises(
        ValueError, match=r"no mpirun belongs to Open MPI 5\.0\.8, the MPI library"
    ):
        launch_command(2)


def test_missing_library_is_refused(monkeypatch):
    monkeypatch.setattr(mpi_launcher, "_library", lambda: None)
    with pytest.raises(ValueError, match=r"no MPI library; load the cluster's MPI .*; if"):
        launch_command(2)


def test_one_rank_needs_no_launcher(installed):
    installed({})
    assert launch_command(1) == []


@pytest.mark.parametrize("ranks", [0, 2.0, "2"])
def test_rank_count_must_be_a_positive_integer(ranks):
    with pytest.raises(ValueError, match=r"ranks = .*: must be a positive integer"):
        run_training("gpt-serial", ranks=ranks)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ([ERROR, EXIT.format(2), PMIX], [ERROR]),
        ([EXIT.format(2), ERROR], [ERROR]),
        ([STACK, ABORT, ABORTED, "last line"], [STACK, "last line"]),
        ([PMIX, EXIT.format(75)], []),
        (["hpc3d.train: 3 s: reading\n", EXIT.format(1)], None),
        ([ERROR, KILLED], None),
        ([WARNING, ERROR, EXIT.format(2)], [WARNING, ERROR]),
        ([RULER, ERROR, "exited with non-zero status\n", RULER], None),
        ([RULER, "incomplete\n"], None),
    ],
)
def test_exit_reports_of_mpirun_are_omitted_if_hpc3d_printed_the_reason(printed, shown):
    code = "import os; from hpc3d.runtime import mpi_launcher as m; m.filter_standard_error(); "
    program = ["sh", "-c", 'printf "%s\\000" "$@" >&2; exit 7', "sh", *printed]
    command = [sys.executable, "-c", f"{code}os.execvp('sh', {program})"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    expected = printed if shown is None else shown
    assert (done.returncode, done.stderr) == (7, "".join(expected))
