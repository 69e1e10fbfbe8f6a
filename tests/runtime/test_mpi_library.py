"""The doctor's findings if MPI, its mpirun and the launcher do not match."""

import os
import re
import subprocess
import sys

import pytest

from hpc3d.runtime import mpi_library
from hpc3d.runtime.finding import FAIL, OK, WARN
from hpc3d.runtime.mpi_library import MpiInstall
from tests.diagnose.planted import only, script, started_by_nobody, verdicts
from tests.mpi import ROOT

OURS = MpiInstall("Open MPI", "5.0.11", "/opt/mpi/lib/libmpi.so.40")
HYDRA = "HYDRA build details:\n    Version:      5.0.2\n"
LISTS = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions: pmix_v4"
OLDER = "srun: MPI types are...\nsrun: none\nsrun: pmi2"


@pytest.fixture
def no_launcher(monkeypatch):
    started_by_nobody(monkeypatch)


@pytest.mark.parametrize(
    ("launcher", "verdict", "text"),
    [
        (OURS._replace(path="/opt/mpi/bin/mpirun"), OK, "library"),
        (OURS._replace(version="4.1.4"), WARN, "5.0.11"),
        (MpiInstall("MPICH", "5.0.2", "/x/mpirun"), FAIL, "a separate job"),
        (MpiInstall("of unknown make", None, "/x/mpirun"), WARN, "no known MPI"),
        (None, FAIL, "PATH"),
    ],
)
def test_mpirun_must_match_the_mpi_library(
    launcher, verdict, text, no_launcher, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = next(mpi_library.mpirun(OURS, launcher))
    assert found[:2] == (verdict, "mpirun") and text in found.text
    assert bool(found.remedy) == (verdict != OK)


def test_srun_may_replace_a_missing_mpirun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path / "srun", "")
    assert only(mpi_library.mpirun(OURS, None)).verdict == WARN


def test_mpirun_next_to_the_library_is_suggested(tmp_path):
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "mpirun", "")
    mpi = OURS._replace(path=str(tmp_path / "lib" / "libmpi.so.40"))
    assert mpi_library.put_on_path(mpi).endswith(f'export PATH="{tmp_path}/bin:$PATH"')
    assert re.match("load .* Open MPI 5.0.11, .* PATH", mpi_library.put_on_path(OURS))


@pytest.mark.parametrize(
    ("printed", "maker", "version"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", "Open MPI", "4.1.4"),
        (HYDRA, "MPICH", "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build", "Intel MPI", "2021.18"),
        ("mpirun: unrecognized option", "of unknown make", None),
    ],
)
def test_mpirun_maker_and_version_are_parsed(printed, maker, version, monkeypatch, tmp_path):
    path = script(tmp_path / "mpirun", f"cat <<END\n{printed}\nEND")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert mpi_library.on_path() == (maker, version, str(path))


def test_running_as_root_requires_consent_variables(no_launcher, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = only(mpi_library.root())
    assert found[:2] == (FAIL, "root") and all(
        name in found.remedy for name in mpi_library.CONSENT
    )
    monkeypatch.setenv(mpi_library.CONSENT[0], "1")
    assert mpi_library.CONSENT[0] + "=" not in only(mpi_library.root()).remedy
    monkeypatch.setenv(mpi_library.CONSENT[1], "1")
    assert not list(mpi_library.root())


@pytest.mark.parametrize(
    ("version", "variable"), [("4.1.4", mpi_library.CROWD_4), ("5.0.11", mpi_library.CROWD_5)]
)
def test_more_ranks_than_cores_require_oversubscription(
    version, variable, no_launcher, monkeypatch, tmp_path
):
    launcher = OURS._replace(version=version, path=str(tmp_path / "bin" / "mpirun"))
    (found,) = mpi_library.oversubscription(launcher)
    assert found.verdict == WARN and f"{variable}=" in found.remedy
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # whose launcher knows how many ranks were asked for
    assert only(mpi_library.oversubscription(launcher)).verdict == OK
    monkeypatch.setenv(variable, "1" if version < "5" else ":OVERSUBSCRIBE")
    assert only(mpi_library.oversubscription(launcher)).verdict == OK
    monkeypatch.setenv(mpi_library.YIELD, "0")
    assert verdicts(mpi_library.oversubscription(launcher))[1] == (WARN, "more ranks than cores")


def test_open_mpi_5_parameter_file_allows_oversubscription(no_launcher, tmp_path):
    launcher = OURS._replace(path=str(tmp_path / "bin" / "mpirun"))
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "prte-mca-params.conf"
    file.write_text("rmaps_default_mapping_policy = slot:oversubscribe\n")
    assert mpi_library.allows_more(launcher)


# ------------------------------------------------------------------------------ launchers


@pytest.mark.parametrize(
    ("printed", "maker", "verdict", "way"),
    [
        (LISTS, "Open MPI", OK, "--mpi=pmix"),
        (LISTS, "MPICH", OK, "--mpi=pmi2"),
        (OLDER, "Open MPI", WARN, "pmi2"),
        (OLDER, "Intel MPI", OK, "--mpi=pmi2"),
    ],
)
def test_srun_plugins_are_checked_against_the_library(
    printed, maker, verdict, way, no_launcher, monkeypatch, tmp_path
):
    script(tmp_path / "srun", f"cat <<END\n{printed}\nEND")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = only(mpi_library.slurm(OURS._replace(maker=maker)))
    assert found[:2] == (verdict, "srun") and way in found.text
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "64")
    job, _ = mpi_library.slurm(OURS)
    assert re.search("64 .* 1 node", job.text)


def test_unconfigured_srun_is_ignored_outside_a_job(no_launcher, monkeypatch, tmp_path):
    script(tmp_path / "srun", "echo srun: fatal: no configuration; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert not list(mpi_library.slurm(OURS))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert verdicts(mpi_library.slurm(OURS)) == [(OK, "Slurm"), (WARN, "srun")]


@pytest.mark.parametrize(
    ("maker", "variables", "text", "remedy"),
    [
        ("Open MPI", {"SLURM_STEP_NUM_TASKS": "64"}, "provides neither PMI", "srun --mpi=pmix"),
        (
            "Open MPI",
            {"SLURM_STEP_NUM_TASKS": "64", "PMI_RANK": "0", "PMI_SIZE": "64"},
            "provides PMI-2",
            "srun --mpi=pmix",
        ),
        ("MPICH", {"SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"}, "PMIx", "srun --mpi=pmi2"),
        ("Open MPI", {"SLURM_NTASKS": "64"}, "srun nor mpirun", "srun --mpi=pmix"),
        (
            "MPICH",
            {"OMPI_COMM_WORLD_SIZE": "64"},
            "Open MPI started 64",
            "PATH",
        ),
        (
            "Open MPI",
            {"PMI_SIZE": "64", "MPI_LOCALNRANKS": "64", "PMI_RANK": "0"},
            "MPICH started 64",
            "PATH",
        ),
        ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "64"}, "another Open MPI", "PATH"),
    ],
)
def test_singleton_cause_is_explained(maker, variables, text, remedy, no_launcher, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = mpi_library.why_singletons(64, OURS._replace(maker=maker))
    assert found[:2] == (FAIL, "launcher")
    assert text in found.text and remedy in found.remedy


@pytest.mark.parametrize(
    ("variable", "foreign_to"),
    [("OMPI_COMM_WORLD_SIZE", "MPICH"), ("MPI_LOCALNRANKS", "Open MPI"), ("PMIX_RANK", None)],
)
def test_launcher_of_another_mpi_is_detected(variable, foreign_to, no_launcher, monkeypatch):
    monkeypatch.setenv(variable, "2")
    makers = [
        maker
        for maker in ("MPICH", "Open MPI")
        if mpi_library.started_by_other_mpi(MpiInstall(maker, "5", None))
    ]
    assert makers == ([foreign_to] if foreign_to else [])


def test_mismatch_report_starts_no_process(no_launcher):
    """It starts neither the processes that the doctor queries, nor MPI."""
    program = """
import sys
from hpc3d.runtime.mpi_library import mismatch_report

started = []
kinds = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
sys.addaudithook(lambda event, words: started.append(event) if event in kinds else None)
lines = mismatch_report(64)
from mpi4py import MPI
print([*started, *["MPI"] * MPI.Is_initialized()], *lines, sep="\\n")
"""
    settings = {**os.environ, "SLURM_STEP_NUM_TASKS": "64", "SLURM_NTASKS": "64"}
    started, *lines = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=settings,
        check=True,
    ).stdout.splitlines()
    assert started == "[]"
    assert lines[0].startswith("FAIL  launcher: srun started 64 ")
    assert lines[1].startswith("      -> srun --mpi=")
    assert any(line.startswith("ok    MPI library: ") for line in lines)
