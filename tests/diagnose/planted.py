"""Simulated faults of a machine, and the doctor's findings for each."""

import os

from hpc3d.runtime import environment
from hpc3d.runtime.finding import OK


def started_by_nobody(monkeypatch):
    """Simulate that a shell started this process, without thread settings."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_LOCAL", "PRTE_")):
            monkeypatch.delenv(name)
    for name in environment.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def verdicts(findings):
    return [(finding.verdict, finding.subject) for finding in findings]


def only(findings):
    """Return the only finding; a problem has a remedy."""
    (finding,) = findings
    assert bool(finding.remedy) == (finding.verdict != OK)
    return finding


def script(path, text):
    """Write a shell script to `path`."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
