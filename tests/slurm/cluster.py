"""A real Slurm on this machine, in its own folder: a controller and a node with 64 virtual cores,
without munge, database or root."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi import ROOT, surroundings
from tests.runs import wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PACKAGES = "apt-get install slurm-wlm libpmix-dev"
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# PMIx looks for a rank's node by the name of its host, so the node has that name.  Slurm would
# look for jobs to start once a minute.  The partition `urgent` preempts jobs of the other one.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=10
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing():
    """Return the programs of Slurm that are missing on this machine."""
    return [name for name in PROGRAMS if not shutil.which(name, path=PATH)]


class Cluster:
    """Slurm commands, run in `site`, the folder from which jobs are submitted."""

    def __init__(self, folder, site):
        self.folder, self.site, self.daemons = folder, site, []
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "LAUNCH", "HIDDEN", "BATCH")
        kept = {key: text for key, text in os.environ.items() if not key.startswith(foreign)}
        own = {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "PATH": PATH}
        self.environment = {**kept, **surroundings(), **own}

    def command(self, *words, check=True, **environment):
        """Return the output of a Slurm command."""
        return subprocess.run(
            list(map(str, words)),
            cwd=self.site,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=500,
            check=check,
        ).stdout.strip()

    def submit(self, *words, **environment):
        """Submit a job; return its number."""
        return self.command("sbatch", "--parsable", *words, **environment)

    def job(self, number):
        """Return the properties of a job, by Slurm's names."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number, state, seconds=500):
        """Return the properties of a job once it is in `state`; fail if it ends otherwise."""
        wait_for(lambda: self.job(number)["JobState"] in {state, *ENDS}, seconds)
        found = self.job(number)
        assert found["JobState"] == state, self.log(number)
        return found

    def log(self, number):
        (path,) = self.site.glob(f"results/*-{number}.log")
        return path.read_text()

    def processes(self):
        """Return all processes of this cluster and its jobs, which use its configuration."""
        mark, found = self.environment["SLURM_CONF"].encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += [int(path.parent.name)] if mark in path.read_bytes() else []
        return found


@contextlib.contextmanager
def running(folder):
    """Context manager of a Cluster, which is always stopped at the end."""
    cluster = Cluster(folder, site_in(folder))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("told to end"))
    try:
        start(cluster)
        yield cluster
    finally:
        stop(cluster)
        signal.signal(signal.SIGTERM, before)


def site_in(folder):
    """Create a folder like the repository's root, with its own results."""
    site = folder / "site"
    (site / "results").mkdir(parents=True)
    for name in ("jobs", "inputs"):
        (site / name).symlink_to(ROOT / name)
    (site / ".venv").symlink_to(sys.prefix)
    return site


def start(cluster):
    """Start the daemons; return the cluster when its node is available."""
    folder, host = cluster.folder, socket.gethostname()
    user = pwd.getpwuid(os.getuid()).pw_name
    text = CONFIGURATION.format(folder=folder, host=host, user=user, ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    for words in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host]):
        with (folder / f"{words[0]}.log").open("w") as log:
            begun = subprocess.Popen(words, env=cluster.environment, stdout=log, stderr=log)
            cluster.daemons.append(begun)
    wait_for(lambda: cluster.command("sinfo", "-h", "-o", "%T", check=False) == "idle")
    if cluster.command("srun", "--mpi=pmix", "echo", "good", check=False) != "good":
        pytest.skip(f"this Slurm finds no PMIx: {PACKAGES}")


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def stop(cluster):
    """Cancel all jobs, stop the daemons, and kill the remaining processes."""
    with contextlib.suppress(subprocess.SubprocessError, AssertionError):
        cluster.command("scancel", "--user", os.getuid())
        wait_for(lambda: not cluster.command("squeue", "-h"))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in cluster.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        end = time.monotonic() + 60
        while cluster.processes() and time.monotonic() < end:
            time.sleep(0.1)
    for daemon in cluster.daemons:
        daemon.wait(120)
