"""`python -m hpc3d.doctor` on this machine, on ranks, and if ranks cannot be started."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc3d import doctor
from hpc3d.diagnose import storage_checks
from hpc3d.runtime import mpi_library
from hpc3d.runtime.finding import FAIL, OK, WARN
from hpc3d.trace import file
from tests.diagnose.planted import only, script, verdicts
from tests.mpi import ROOT, mpirun, surroundings
from tests.runs import assert_gone, ended, time_is_up_when
from tests.strided import strided

HERE = Path(sys.executable).parent
ALONE = [
    *("Python", "packages", "threads", "BLAS", "open files", "disk", "file system", "HDF5"),
    *("GPU", "MPI library", "shared memory", "mpirun", "1 rank"),
]
TOGETHER = ["ranks", "versions", "folder", "MPI", "node", "messages"]
LONG = 250  # seconds, which a busy machine does not exceed


def run(*words, path=(), cwd=None, **environment):
    """Run the doctor from a shell, with some folders at the front of PATH."""
    settings = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        **surroundings(),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([*map(str, path), str(HERE), os.environ["PATH"]]),
        **environment,
    }
    command = [sys.executable, "-m", "hpc3d.doctor", *map(str, words)]
    return subprocess.run(
        command,
        env=settings,
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=cwd,
        check=False,
    )


def findings(done):
    """Return {subject: row} of the JSON in the last line, which must match the lines above."""
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {row["subject"]: row for row in result["findings"]}
    for row in result["findings"]:
        assert f"{row['verdict']:5} {row['subject']}: {row['text']}\n" in done.stdout
        assert (row["verdict"] == OK) == (not row["remedy"])
    assert (result["verdict"] == FAIL) == (done.returncode == 3)
    return rows


def failed(rows):
    return [subject for subject, row in rows.items() if row["verdict"] == FAIL]


def test_doctor_passes_on_this_machine(tmp_path):
    done = run("--json", "--out", tmp_path / "results", "--timeout", LONG)
    rows = findings(done)
    assert done.returncode == 0, done.stdout
    assert rows.keys() >= {*ALONE, *(f"2 ranks, {subject}" for subject in TOGETHER)}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_doctor_passes_on_two_ranks_and_prints_once(tmp_path):
    done = mpirun(2, "-m", "hpc3d.doctor", "--json", "--out", tmp_path, "--timeout", LONG)
    rows = findings(done)
    assert done.returncode == 0
    assert set(rows) >= {"Python", "HDF5", "shared memory", *TOGETHER}
    assert rows["ranks"]["text"].startswith("2 on 1 host: ")
    assert rows["node"]["text"].count("by shared memory") == 1
    assert done.stdout.count("ok    Python: ") == 1
    assert not {"2 ranks, ranks", "mpirun"} & set(rows)  # no mpirun within mpirun
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_planted_problems_on_ranks_are_found(tmp_path):
    done = mpirun(3, "-m", "tests.diagnose.on_job_checks", tmp_path)
    found = dict(map(json.loads, done.stdout.splitlines()))
    wrong = {
        plan: [(row[0], row[1]) for row in rows if row[0] != OK and row[3]]
        for plan, rows in found.items()
    }
    assert wrong == {
        "nothing": [],
        "versions": [(FAIL, "versions")],
        "folder": [(FAIL, "folder")],
        "no_folder": [(FAIL, "folder")],
        "message": [(FAIL, "MPI")],
        "memory": [(FAIL, "node")],
        "cores": [(WARN, "cores")],
        "hosts": [(WARN, "order"), (WARN, "clocks")],
        "numbers": [(WARN, "local ranks")],
        "gpus": [(WARN, "devices of ranks")],
    }
    texts = {plan: " ".join(row[2] for row in rows) for plan, rows in found.items()}
    assert "h5py h5py of rank 0 on ranks 0, h5py of rank 1 on ranks 1" in texts["versions"]
    assert "is a different folder for ranks 1-2" in texts["folder"]
    assert "wrong result on ranks 1-2" in texts["message"]
    assert "3 on 2 hosts: host0 0 2, host1 1" in texts["hosts"]
    assert "at most 5 s" in texts["hosts"]
    assert "0:0, 1:0, 2:0" in texts["gpus"]
    assert "auto selects host-staged: no NCCL on ranks 0-2; MPI does not report" in texts["gpus"]


def test_clock_offsets_add_up_along_the_tree():
    """Host 3 compares its clock with host 1, and host 1 with host 0; each is 2 s behind."""
    compared = SimpleNamespace(leaders=[0, 4, 8, 12])
    samples = [[] for _ in range(16)]
    for leader, peer in ((4, 0), (8, 0), (12, 4)):
        samples[leader] = [(leader, 0, 2e9, 1000, 1, peer)]
    assert doctor.apart(compared, samples) == [0, -2, -2, -4]


def test_help_is_complete_and_invalid_options_are_rejected(capsys):
    done = run("--help")
    words = (
        "mpirun -np N",
        "--out DIR",
        "--together",
        "--timeout SECONDS",
        "--json",
        "exit codes",
    )
    assert done.returncode == 0 and all(word in done.stdout for word in words)
    for word in (["--timeout", "0"], ["--timeout", "soon"], ["--together"], ["--thorough"]):
        assert ended(doctor.main, *word) == 2
        error = capsys.readouterr().err
        assert error.startswith("hpc3d.doctor: ") and error.count("\n") == 1


# ------------------------------------------------------------------- what keeps ranks apart


@pytest.mark.slow
def test_mpirun_of_another_mpi_is_detected(tmp_path):
    """It starts two processes that do not join one Open MPI job."""
    one = f'PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_RANK=$rank "{sys.executable}" "$@"'
    script(
        tmp_path / "mpirun",
        '[ "$1" = --version ] && echo HYDRA Version: 5.0.2 && exit\n'
        f"shift 3\nfor rank in 1 0; do {one} || exit; done",
    )
    done = run("--json", path=[tmp_path], cwd=tmp_path)
    rows = findings(done)
    assert done.returncode == 3 and failed(rows) == ["mpirun", "2 ranks, launcher"]
    assert "the mpirun of MPICH started 2" in rows["2 ranks, launcher"]["text"]
    assert "first" in rows["mpirun"]["remedy"]


@pytest.mark.slow
def test_missing_mpi_library_is_detected(tmp_path):
    (tmp_path / "libmpi.so").write_text("not a library")
    done = run("--json", cwd=tmp_path, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    rows = findings(done)
    assert done.returncode == 3 and failed(rows) == ["MPI library"]
    assert "hpc3d[mpi]" in rows["MPI library"]["remedy"]


def test_debian_mpich_library_is_named(tmp_path, monkeypatch):
    library = tmp_path / "x86_64-linux-gnu" / "libmpich.so.12"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(mpi_library, "_LIBRARIES", tmp_path)
    monkeypatch.setattr(mpi_library, "_loaded", lambda: ctypes.CDLL("libmpi.so.12"))
    (found,) = mpi_library.library()
    assert found.verdict == FAIL and f"ln -s {library} " in found.remedy


def test_failing_single_rank_start_is_detected(monkeypatch):
    monkeypatch.setattr(doctor, "_ONE_RANK", "print('srun has no PMI'); raise SystemExit(1)")
    (found,) = doctor.one_rank(SimpleNamespace(timeout=LONG))
    assert (found.verdict, found.subject, found.printed) == (FAIL, "1 rank", ("srun has no PMI",))


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_of_several_singletons_reports(rank, tmp_path):
    where = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_PROCID": str(rank)}
    done = run("--json", "--together", cwd=tmp_path, **where)
    if rank:
        assert (done.returncode, done.stdout) == (0, "")
    else:
        assert done.returncode == 3 and failed(findings(done)) == ["launcher"]


# ------------------------------------------------------ launchers that start nothing or hang


@pytest.fixture
def options(tmp_path):
    return SimpleNamespace(out=tmp_path, timeout=LONG)


@pytest.mark.parametrize(
    ("does", "remedy"),
    [
        ("echo 'mpirun has detected an attempt to run as root.' >&2; exit 1", "RUN_AS_ROOT=1"),
        ("echo 'There are not enough slots available'; exit 1", "--oversubscribe"),
        ("echo 'RuntimeError: cannot load MPI library'; exit 1", "hpc3d[mpi]"),
        ("echo 'libmpi.so.40: cannot open shared object file'; exit 127", "modules"),
        ("echo 'OMPI was not built with PMI support'; exit 1", "mpirun of the same MPI library"),
        ("echo 'mkdir: No space left on device'; exit 1", "TMPDIR"),
        ("echo 'PMIx server\"s listener thread failed to start'; exit 1", "ompi.*"),
        ("kill -SEGV $$", "for more output, run mpirun"),
        ("true", "for more output, run mpirun"),
        ("""echo '{"verdict": "ok", "findings": []}'; exit 139""", "for more output, run mpirun"),
    ],
)
def test_launcher_that_starts_no_ranks_is_detected(does, remedy, options, tmp_path):
    found = only(doctor.two_ranks(script(tmp_path / "mpirun", does), options))
    assert found[:2] == (FAIL, "2 ranks") and remedy in found.remedy
    for said in does.split("'")[1:2]:
        assert said in "\n".join(found.printed)


@pytest.mark.parametrize("trap", strided(["", "trap '' TERM\n"], 2))
def test_hanging_launcher_is_killed(trap, options, tmp_path, monkeypatch):
    """Before the timeout, it has printed a text and started a process."""
    forever, began = f"sleep 9999.{os.getpid()}", tmp_path / "began"
    text = f"{trap}echo began\n{forever} & touch {began}\n{forever}"
    launcher = script(tmp_path / "mpirun", text)
    time_is_up_when(monkeypatch, began.exists, options.timeout)
    found = only(doctor.two_ranks(launcher, options))
    assert found[:2] == (FAIL, "2 ranks") and "began" in found.printed
    assert f"within {LONG} s" in found.text
    assert "btl_tcp_if_include" in found.remedy
    assert_gone(forever.replace(" ", "\0"))


# ------------------------------------------------------------------------------------- HDF5


def test_hdf5_write_and_read_check_passes(tmp_path):
    assert verdicts(doctor.hdf5(tmp_path)) == [(OK, "HDF5")]
    assert not list(tmp_path.iterdir())


def test_unwritable_table_fails_the_hdf5_check(tmp_path, monkeypatch):
    def without_filter(*_):
        raise ValueError("Unable to create dataset (unable to find filter 'deflate')")

    monkeypatch.setattr(file, "write_table", without_filter)
    found = only(doctor.hdf5(tmp_path))
    assert found.verdict == FAIL and "wheel on PyPI" in found.remedy


def test_table_read_back_differently_fails_the_hdf5_check(tmp_path, monkeypatch):
    write = file.write_table

    def wrong(opened, path, columns, data):
        return write(opened, path, columns, data[::-1])

    monkeypatch.setattr(file, "write_table", wrong)
    assert only(doctor.hdf5(tmp_path)).verdict == FAIL


def test_unwritable_folder_is_reported_once(tmp_path, monkeypatch):
    def refused(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage_checks, "scratch", refused)
    assert only(storage_checks.storage(tmp_path))[:2] == (FAIL, "disk")
    assert not list(doctor.hdf5(tmp_path))
