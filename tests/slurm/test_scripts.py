"""The scripts of jobs/ without Slurm: the commands that they start, and when they requeue."""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from tests.mpi import ROOT
from tests.runs import wait_for

JOBS = ROOT / "jobs"
TASKS = range(10)


@pytest.fixture
def site(tmp_path):
    """Folder like the repository's root, with an empty environment and a scontrol that records its
    arguments."""
    for name in ("jobs", "inputs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("results", ".venv/bin", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    program(tmp_path / "bin/launch", 'echo "launch $*"; echo "run kept in results"')
    program(tmp_path / "bin/scontrol", 'echo "$*" >> asked')
    return tmp_path


def program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def begin(site, script, *words, launch="launch", task=None):
    """Start a script as Slurm does, in job 7."""
    job = {"JOB_ID": "7", "JOB_NAME": "job", "JOB_NODELIST": "node", "SUBMIT_DIR": str(site)}
    job |= {} if task is None else {"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": str(task)}
    environment = {f"SLURM_{key}": text for key, text in job.items()}
    path = f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", JOBS / script, *words],
        env=os.environ | environment | {"LAUNCH": launch, "PATH": path},
        text=True,
        stdout=subprocess.PIPE,
    )


def started(*arguments, **how):
    """Return the commands that a script starts, here `launch` or `report`, with arguments."""
    process = begin(*arguments, **how)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0
    return shlex.split(said.splitlines()[1])


@pytest.mark.parametrize("path", sorted(JOBS.glob("[!.]*.s*")), ids=lambda path: path.name)
def test_shell_accepts_every_script(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.name)
def test_script_outside_slurm_asks_for_sbatch(path):
    environment = {k: text for k, text in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", path], env=environment, capture_output=True, text=True, check=False
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode and "SLURM_SUBMIT_DIR: submit with sbatch" in line


def settled(words):
    """Return ranks and configuration of `launch -n RANKS python -m hpc3d.train INPUT ...`."""
    _, _, ranks, _, _, verb, path, *rest = words
    assert verb == "hpc3d.train"
    return int(ranks), resolve(load(ROOT / path, rest), int(ranks))


def work(config):
    """Return a number proportional to hidden^2 tokens."""
    return config.model.hidden**2 * config.train.batch


@pytest.mark.parametrize("script", ["weak-scaling.sbatch", "strong-scaling.sbatch"])
def test_array_layouts_fit_and_have_the_intended_work(script, site):
    runs = [settled(started(site, script, "--train.steps", "3", task=task)) for task in TASKS]
    ranks, configs = zip(*runs, strict=True)
    assert set(ranks) == {1, 8, 64}
    shares = {work(config) / (count if "weak" in script else 1) for count, config in runs}
    assert len(shares) == 1
    assert len({(config.parallel.scheme, *config.sizes().values()) for config in configs}) == 10
    assert [config.name for config in configs] == sorted(config.name for config in configs)
    assert {(config.run.out, config.train.steps) for config in configs} == {("results/job-7", 3)}


def test_train_script_accepts_an_input_and_options(site):
    words = started(site, "train.sbatch", "inputs/gpt-3d-8.toml", "--train.steps", "5")
    own = ["inputs/gpt-3d-8.toml", "--train.steps", "5", "--run.out", "results/job-7"]
    assert words == ["launch", "python", "-m", "hpc3d.train", *own]
    assert started(site, "train.sbatch")[4] == "inputs/gpt-3d-64.toml"


def test_evaluate_script_uses_the_newest_run_of_a_job_that_has_a_checkpoint(site):
    for name in ("a/checkpoints/step-00000004", "b/checkpoints/step-00000002", "c"):
        (site / "results/job-6" / name).mkdir(parents=True)
    own = ["--data", "a.txt", "b.txt", "--batches", "2"]
    words = started(site, "evaluate.sbatch", "results/job-6", *own)
    assert words == ["launch", "python", "-m", "hpc3d.evaluate", "results/job-6/b", *own]
    assert started(site, "evaluate.sbatch", "results/job-6/a", *own)[4] == "results/job-6/a"
    assert started(site, "evaluate.sbatch", "models/gpt2", *own)[4] == "models/gpt2"


def test_srun_binds_each_rank_to_cores_of_its_own(site):
    program(site / "bin/srun", 'echo "srun $*"; echo "run kept in results"')
    words = started(site, "train.sbatch", launch="")
    assert words[:4] == ["srun", "--mpi=pmix", "--cpu-bind=cores", "--distribution=block:block"]


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.name)
def test_every_script_has_disabled_lines_for_account_memory_and_gpus(path):
    text = path.read_text()
    disabled = re.findall(r"^##SBATCH --([\w-]+)", text, re.M)
    assert {"account", "mem-per-cpu"} <= {*disabled}
    assert ("gpu-bind" in disabled) == ("gpus-per-node" in text)


def test_array_tasks_train_separate_runs(site):
    """Otherwise, the second task would continue the run of the first."""
    (site / "results/job-7_1/a/checkpoints/step-00000004").mkdir(parents=True)
    assert started(site, "train.sbatch", task=0)[-2:] == ["--run.out", "results/job-7_0"]
    assert started(site, "train.sbatch", task=1)[-1] == "results/job-7_1/a"


def test_ranks_receive_the_environment_of_the_job(site, monkeypatch):
    """This also holds after `sbatch --export=NONE`, which Slurm would pass on to srun."""
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")
    program(site / "bin/launch", 'echo "$SLURM_EXPORT_ENV"; echo "run kept in results"')
    assert started(site, "train.sbatch") == ["ALL"]


@pytest.mark.parametrize("count", [8, 64])
def test_gpu_job_has_the_ranks_of_its_input(count, site):
    script = f"train-{count}-gpu.sbatch"
    *_, path, option, out = started(site, script)
    assert (option, out) == ("--run.out", "results/job-7")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)", (JOBS / script).read_text(), re.M))
    nodes, here, gpus = (int(asked[k]) for k in ("nodes", "ntasks-per-node", "gpus-per-node"))
    assert nodes * here == int(asked["ntasks"]) == count
    assert here == gpus
    config = resolve(load(ROOT / path, []), count)
    assert config.train.backend == "cupy"


def test_restarted_job_resumes_its_newest_run(site):
    for name in ("a/checkpoints/step-00000004", "b/checkpoints/step-00000002.tmp", "c"):
        (site / "results/job-7" / name).mkdir(parents=True)
    words = started(site, "train.sbatch", "--train.steps", "5")
    assert words[-2:] == ["--resume", "results/job-7/a"]
    (site / "results/job-7/b/checkpoints/step-00000002").mkdir()
    assert started(site, "train.sbatch")[-1] == "results/job-7/b"


@pytest.mark.parametrize(
    ("code", "told", "saved", "again"),
    [
        (75, True, True, True),
        (75, False, True, False),
        (75, True, False, False),
        (1, True, True, False),
        (0, True, True, False),
    ],
)
@pytest.mark.parametrize("script", ["train.sbatch", "resume.sbatch"])
def test_only_a_run_that_saved_on_the_signal_is_requeued(script, code, told, saved, again, site):
    run = "results/job-7/run"
    ending = (
        f"trap 'exit {code}' USR1; touch ready; while {str(told).lower()}; do sleep 0.01; done"
    )
    save = f"mkdir -p {run}/checkpoints/step-00000003" if saved else "true"
    program(site / "ranks", f"{save}; echo run kept in {run}; {ending}; exit {code}")
    process = begin(site, script, run, launch=str(site / "ranks"))
    if told:
        wait_for((site / "ready").exists)
        process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=500)
    assert process.returncode == code
    asked = site / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if again else "")


@pytest.mark.slow
@pytest.mark.parametrize(("said", "code"), [("step 3", 1), ("run kept in results/job-7", 0)])
def test_launcher_that_ends_before_the_run_is_a_failure(said, code, site):
    program(site / "bin/launch", f"echo {said}")
    process = begin(site, "train.sbatch")
    process.communicate(timeout=500)
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "ends", "code"), [("step 3", 0, 1), ("run kept in results", 0, 0), ("", 5, 5)]
)
def test_mpirun_script_returns_the_exit_code_of_the_run(said, ends, code, site):
    program(site / "bin/mpirun", f'echo "$* {said}"; exit {ends}')
    path = f"{site / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", JOBS / "mpirun.sh", "-np", "8", "python"]
    done = subprocess.run(
        words, env=os.environ | {"PATH": path}, text=True, capture_output=True, check=False
    )
    assert done.returncode == code
    assert done.stdout == f"-np 8 python {said}\n"
    assert ("a host or its link was lost" in done.stderr) == (not ends and bool(code))


def test_report_script_accepts_a_job_or_named_runs(site):
    program(site / "bin/python", 'echo "$*"')
    for name in ("job-7/a", "job-7/b", "job-7/report"):
        (site / "results" / name).mkdir(parents=True)
    for name in ("a", "b"):
        (site / "results/job-7" / name / "config.toml").touch()
    whole = started(site, "report.sbatch", "results/job-7", "--tables")
    runs = ["results/job-7/a", "results/job-7/b"]
    assert whole == ["-m", "hpc3d.report", *runs, "--out", "results/job-7/report", "--tables"]
    assert started(site, "report.sbatch", *runs) == ["-m", "hpc3d.report", *runs]


def test_sweep_script_runs_the_point_of_its_task(site):
    program(site / "bin/python", 'printf "%q " "$@"')
    words = started(site, "sweep.sbatch", "study.toml", "--out", "a b", task=3, launch="srun -K")
    own = ["study.toml", "--out", "a b", "--point", "3", "--launcher", "srun -K"]
    assert words[:9] == ["-m", "hpc3d.sweep", *own]
