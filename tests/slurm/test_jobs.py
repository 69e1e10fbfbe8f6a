"""The scripts of jobs/ under a real Slurm: `make slurm-test`."""

import csv
import json
import re
import shlex

import numpy as np
import pytest

from tests.mpi import ROOT
from tests.runs import SMALL, losses, wait_for
from tests.slurm.cluster import PACKAGES, missing, running

pytestmark = pytest.mark.slurm

if missing():
    pytest.skip(f"no {', '.join(missing())} here: {PACKAGES}", allow_module_level=True)

SCRIPTS = sorted(path.name for path in (ROOT / "jobs").glob("*.sbatch"))
LAUNCHERS = ("srun --mpi=pmix --cpu-bind=cores --distribution=block:block", "mpirun")
LINE = re.compile(r"^ *(\d+) +(\d+\.\d+) ", re.MULTILINE)
TOKENS = SMALL["train.batch"] * SMALL["model.sequence"]
SECONDS = 4  # that a run has to be told to stop


def options(values):
    return [word for key, value in values.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
    assert not cluster.processes()


def train(cluster, launch, steps, ranks=4):
    """Submit a training job that saves after the last step; return its number."""
    words = options(SMALL | {"train.steps": steps, "checkpoint.every": 1_000_000})
    return cluster.submit("-n", ranks, "jobs/train.sbatch", *words, LAUNCH=launch)


def run_of(cluster, job):
    """Return the only run of a job."""
    (run,) = cluster.site.glob(f"results/*-{job}/*")
    return run


def lines(run):
    """Return the steps in the log of a run, with their printed losses."""
    return LINE.findall((run / "train.log").read_text())


def begun(cluster, job):
    """Wait until a job has completed its second step."""
    logs = f"results/*-{job}/*/train.log"
    wait_for(lambda: any("   1 " in log.read_text() for log in cluster.site.glob(logs)))


@pytest.fixture(scope="module")
def steps(cluster):
    """Number of steps that take SECONDS here."""
    job = train(cluster, "mpirun", 10)
    cluster.wait(job, "COMPLETED")
    rates = re.findall(r"^ +\d+ +\S+ +\S+ +\S+ +(\d+) ", cluster.log(job), re.MULTILINE)
    return min(max(20, SECONDS * int(np.median([*map(int, rates)])) // TOKENS), 2000)


@pytest.fixture(scope="module")
def whole(cluster, steps):
    """Uninterrupted run, two steps longer than the others."""
    job = train(cluster, "mpirun", steps + 2)
    cluster.wait(job, "COMPLETED")
    return run_of(cluster, job)


@pytest.mark.parametrize("script", SCRIPTS)
def test_slurm_accepts_every_script(cluster, script):
    """This cluster has one node, and no GPUs."""
    here = ["-N", 1, "--ntasks-per-node=64", "-c", 1, "--gpus-per-node=0"]
    cluster.command("sbatch", "--test-only", *(here * ("gpu" in script)), f"jobs/{script}")


def preempt(cluster, job):
    """Submit a job with higher priority that requires the whole node."""
    cluster.submit("-p", "urgent", "-n", 64, "-o", "/dev/null", "--wrap", "true")


def remind(cluster, job):
    """Signal the job's script, as Slurm does before the time limit."""
    cluster.command("scancel", "--batch", "--signal=USR1", job)


@pytest.fixture(scope="module", params=[*zip(LAUNCHERS, (preempt, remind), strict=True)])
def continued(request, cluster, steps):
    """Wait for a job that was stopped and requeued; return its number and its properties."""
    launch, act = request.param
    job = train(cluster, launch, steps)
    begun(cluster, job)
    act(cluster, job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1")
    cluster.wait(job, "PENDING")
    # Slurm would wait for two minutes, and cannot start a job in the second that queued it again.
    cluster.command("scontrol", "update", f"jobid={job}", "StartTime=now+2")
    return job, cluster.wait(job, "COMPLETED")


def test_signaled_job_is_requeued_and_resumes(cluster, continued, steps, whole):
    job, seen = continued
    assert seen["Restarts"] == "1"
    said = cluster.log(job)
    (stopped,) = re.findall(r"stopped after ([\d,]+) of [\d,]+ steps: received SIGUSR1", said)
    (begins,) = re.findall(r"resume: step (\d+) follows .*results/", said)
    assert int(begins) == int(stopped.replace(",", "")) < steps
    assert re.findall(r"^job .* restart (\d+)", said, re.MULTILINE) == ["0", "1"]
    run = run_of(cluster, job)
    assert lines(run) == lines(whole)[:steps]
    found = losses(run)
    assert found.tolist() == losses(whole)[steps - len(found) : steps].tolist()


def test_run_resumes_in_another_job_on_another_layout(cluster, continued, steps, whole):
    run = run_of(cluster, continued[0]).relative_to(cluster.site)
    words = ["jobs/resume.sbatch", run, "--train.steps", steps + 2]
    job = cluster.submit("-n", 2, "--export=NONE", *words)
    cluster.wait(job, "COMPLETED")
    place = cluster.site / run / "checkpoints"
    assert f"resume: step {steps} follows checkpoint {place}/step-" in cluster.log(job)
    last = losses(cluster.site / run)[-2:]
    np.testing.assert_allclose(last, losses(whole)[-2:], rtol=1e-10)


def test_cancelled_job_saves_and_is_not_requeued(cluster):
    job = train(cluster, LAUNCHERS[0], 5000)
    begun(cluster, job)
    cluster.command("scancel", job)
    wait_for(lambda: not cluster.command("squeue", "-h"))
    assert cluster.wait(job, "CANCELLED")["Restarts"] == "0"
    run = run_of(cluster, job)
    said = cluster.log(job)
    assert "received SIGTERM" in said and "saved; resume with --resume" in said
    assert len([*run.glob("checkpoints/step-????????")]) == 1


def test_singleton_ranks_are_explained_under_slurm(cluster):
    job = train(cluster, "srun --mpi=none", 5, ranks=2)
    assert cluster.wait(job, "FAILED")["ExitCode"] == "2:0"
    assert "2 processes were started, but MPI sees 1" in cluster.log(job)


def test_documented_launcher_check_passes(cluster):
    words = f"make -C {ROOT} test-mpi NP=2 LAUNCH='{LAUNCHERS[0]}'"
    job = cluster.submit("-n", 2, "-o", "results/check-%j.log", "--wrap", words)
    cluster.wait(job, "COMPLETED", 500)
    assert re.search(r"^\d+ passed", cluster.log(job), re.MULTILINE)


def test_evaluation_job_has_the_same_result_on_any_number_of_ranks(cluster):
    """The launcher is the default of launch.sh, which binds ranks to cores."""
    trained = train(cluster, "mpirun", 3, ranks=2)
    cluster.wait(trained, "COMPLETED")
    folder = run_of(cluster, trained).relative_to(cluster.site)
    (cluster.site / "held.txt").write_text("One text that no run has seen. " * 20)
    words = ["jobs/evaluate.sbatch", folder, "--data", "held.txt", "--json"]
    found = []
    for ranks in (1, 2):
        job = cluster.submit("-n", ranks, *words, "--train.dtype", "float64")
        cluster.wait(job, "COMPLETED")
        assert LAUNCHERS[0] in cluster.log(job)
        found.append(json.loads(cluster.log(job).splitlines()[-1])["files"][0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_array_of_layouts_produces_one_table(cluster):
    small = {key: SMALL[key] for key in ("model.heads", "model.sequence")} | {"train.steps": 4}
    words = ["-n", 8, "--array=0,1,4", "jobs/weak-scaling.sbatch", *options(small)]
    array = cluster.submit(*words, HIDDEN="72", BATCH="72")
    folder = f"results/hpc3d-weak-scaling-{array}"
    report = cluster.submit(f"--dependency=afterany:{array}", "jobs/report.sbatch", folder)
    cluster.wait(report, "COMPLETED")
    with (cluster.site / folder / "report" / "tables" / "scaling.csv").open() as file:
        rows = [(row["ranks"], row["layout"], row["scaling"]) for row in csv.DictReader(file)]
    assert rows == [("1", "", "strong"), ("8", "1d", "weak"), ("8", "3d", "weak")]


def test_array_of_points_produces_one_table(cluster):
    small = {key: SMALL[key] for key in ("model.heads", "model.hidden", "model.sequence")}
    (cluster.site / "study.toml").write_text("[sweep]\nranks = [1, 2]\ntrain.batch = 144\n")
    study = ["study.toml", *options(small | {"train.steps": 3})]
    array = cluster.submit("-n", 2, "--array=0-1", "jobs/sweep.sbatch", *study)
    words = shlex.join(["python", "-m", "hpc3d.sweep", *map(str, study), "--table"])
    after = [f"--dependency=afterany:{array}", "-o", "results/table-%j.log"]
    job = cluster.submit(*after, "--wrap", f". .venv/bin/activate && {words}")
    cluster.wait(job, "COMPLETED")
    with (cluster.site / "results/study/runs.csv").open() as file:
        losses = {row["ranks"]: float(row["loss"]) for row in csv.DictReader(file)}
    assert losses["1"] == pytest.approx(losses["2"], rel=1e-5)
