"""Slurm on two nodes, which are emulated hosts: `srun` starts the ranks on both."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hosts.emulated import PATH, Emulated
from tests.mpi import ENVIRONMENT, ROOT
from tests.runs import losses, newest, train, wait_for, words
from tests.slurm.cluster import PACKAGES, missing

pytestmark = pytest.mark.hosts

if missing():
    pytest.skip(f"no {', '.join(missing())} here: {PACKAGES}", allow_module_level=True)

CONFIGURATION = """\
ClusterName=hosts
SlurmctldHost=hn1
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=hn[1-2] CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def command(folder):
    """Run Slurm commands on its first node, which exists as long as the hosts."""
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    own = {"SLURM_CONF": folder / "slurm.conf", "PATH": PATH, "PYTHONPATH": ROOT, **ENVIRONMENT}
    given = ["env", "-C", folder, *(f"{name}={text}" for name, text in own.items())]
    with Emulated(2, shared=[folder]) as hosts:

        def command(*line, host=1, **how):
            return hosts.on(host, *given, *line, **how)

        command("slurmctld", "-c")
        for host in (1, 2):
            command("slurmd", "-N", f"hn{host}", host=host)
        wait_for(lambda: command("sinfo", "-h", "-o", "%D %T", check=False) == "2 idle\n")
        if command("srun", "-N2", "--mpi=pmix", "echo", "good", check=False) != "good\n" * 2:
            pytest.skip(f"this Slurm finds no PMIx: {PACKAGES}")
        yield command


def test_srun_trains_on_two_nodes(command, folder):
    python = Path(sys.executable)
    launch = ["srun", "--mpi=pmix", "-N2", "-n4", "--ntasks-per-node=2", python]
    command(*launch, "-m", "hpc3d.train", *words(folder / "run", train__steps=2), timeout=200)
    run = newest(folder / "run")
    assert "\n4 ranks on 2 hosts: hn1 2, hn2 2\n" in (run / "train.log").read_text()
    alone = losses(train(1, folder / "alone", train__steps=2))
    np.testing.assert_allclose(losses(run), alone, rtol=1e-10)


def test_doctor_connects_all_ranks_under_srun(command, folder):
    launch = ["srun", "--mpi=pmix", "-N2", "-n4", "--ntasks-per-node=2", "python"]
    said = command(*launch, "-m", "hpc3d.doctor", "--together", "--out", folder, timeout=100)
    assert "4 on 2 hosts: hn1 0-1, hn2 2-3" in said and "0 FAIL" in said
