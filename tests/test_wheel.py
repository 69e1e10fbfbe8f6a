"""The sdist and the wheel: every command runs in an empty folder, without the source tree."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.mpi import ROOT, mpirun, surroundings
from tests.strided import rotating

pytestmark = [pytest.mark.slow, rotating(1)]  # they share what is built

BUILD = "from setuptools import build_meta; build_meta.build_{}('dist')"
SOURCES = ("hpc3d", "inputs", "jobs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
SMALL = [f"--{option}" for option in ("model.hidden=128", "train.batch=16", "train.steps=2")]


def run(*command, cwd):
    """Return the standard output of a command that must exit with 0."""
    settings = {**os.environ, **surroundings(), "PYTHONPATH": ""}
    command = [*map(str, command)]
    done = subprocess.run(
        command, capture_output=True, cwd=cwd, env=settings, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Copy of the source with a wheel and an sdist in dist/, and the sdist's wheel in again/."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, source)
    (source / "inputs" / "machines" / "this-machine.toml").touch()  # stays here
    for kind in ("sdist", "wheel"):
        run(sys.executable, "-c", BUILD.format(kind), cwd=source)
    (sdist,) = source.glob("dist/*.tar.gz")
    wheel = "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"
    run(sys.executable, *wheel, "-w", "again", sdist, cwd=source)
    return source


def contents(path):
    """Return {name: bytes} of the package in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if name.startswith("hpc3d/")}


def test_sdist_and_wheel_contain_every_package_file(built):
    walk = [(Path(here), names) for here, _, names in os.walk(ROOT / "hpc3d", followlinks=True)]
    files = {here / name for here, names in walk if here.name != "__pycache__" for name in names}
    wanted = {str(path.relative_to(ROOT)): path.read_bytes() for path in files}
    wanted.pop("hpc3d/share/machines/this-machine.toml", None)
    (wheel,), (again,), (sdist,) = (
        built.glob(glob) for glob in ("dist/*.whl", "again/*.whl", "dist/*.tar.gz")
    )
    assert contents(wheel) == wanted == contents(again)
    with tarfile.open(sdist) as archive:
        inside = [member for member in archive.getmembers() if "/hpc3d/" in member.name]
    assert {member.name.partition("/")[2] for member in inside if member.isfile()} == {*wanted}
    assert not [member.name for member in inside if member.issym()]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Script `hpc3d` of a new environment with the sdist's wheel; other packages are those of this
    environment."""
    folder = tmp_path_factory.mktemp("environment")
    (wheel,) = built.glob("again/*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", ".", cwd=folder)
    install = "install", "-q", "--no-deps", "--no-index", wheel
    run(sys.executable, "-m", "pip", "--python", "bin/python", *install, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    shutil.rmtree(built)
    return folder / "bin" / "hpc3d"


@pytest.fixture
def surrounding(monkeypatch):
    """Environment in which the new one finds mpirun and MPI of this one."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for library in Path(sys.prefix, "lib").glob("libmpi.so.*"):
        monkeypatch.setenv("MPI4PY_LIBMPI", str(library))


@pytest.fixture
def hpc3d(installed, surrounding, tmp_path):
    """Return a function that runs `hpc3d WORDS` in an empty folder, on one or several ranks."""

    def call(*words, ranks=None):
        if ranks is None:
            return run(installed, *words, cwd=tmp_path)
        environment = {"PYTHONPATH": ""}
        how = {"cwd": tmp_path, "environment": environment, "program": installed, "timeout": 240}
        done = mpirun(ranks, *words, **how)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "hpc3d COMMAND ...  =  python -m hpc3d COMMAND"),
        ("--version", "hpc3d "),
        ("plan gpt-3d-64 --ranks 8 --machine h100", "8 ranks of h100, 80.00 GB each"),
        ("plan gpt-3d-64.toml --ranks 8", "8 ranks of h100 (the default machine), 80.00 GB each"),
        ("simulate gpt-3d-64 --machine h100", "64 ranks of h100: x=4 y=4 z=4, scheme 3d"),
        ("simulate inputs/gpt2-124m-h200.toml --machine inputs/machines/h200.toml", "1 rank of"),
        ("simulate schedule --name 1f1b --stages 4 --microbatches 8", "makespan"),
        ("bench vtrain", "1440 rows; calibration on every 10th row"),
        ("prepare inputs/corpus -o tokens.h5", "tokens      1,000,177"),
        ("doctor", "0 FAIL"),
        ("train gpt-serial --train.steps 1 --train.batch 16", "run kept in "),
    ],
)
def test_installed_command_runs_in_an_empty_folder(words, said, hpc3d):
    assert said in hpc3d(*words.split())


def test_installed_package_predicts_published_steps(installed, tmp_path):
    """Only the first row is predicted, because all rows take minutes."""
    settings = {**os.environ, "PYTHONPATH": ""}
    how = {"cwd": tmp_path, "env": settings, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen([installed, "bench", "published"], **how) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        process.kill()
    assert lines[1] == "arXiv:2205.05198, table 5: seconds per step\n"
    assert lines[3].split()[:4] == ["22B", "8", "full", "1.42"]


def test_installed_package_trains_reports_and_resumes(hpc3d, tmp_path):
    assert "run kept in " in hpc3d("train", *SMALL, "--checkpoint.every", 2, ranks=2)
    (folder,) = (tmp_path / "results").iterdir()
    assert "step-00000002" in hpc3d("checkpoint", "show", folder)
    assert "is complete" in hpc3d("checkpoint", "verify", folder)
    assert "written to " in hpc3d("report", folder)
    page = (folder / "report" / "report.html").read_text(encoding="utf-8")
    assert (
        ROOT / "hpc3d" / "analyze" / "report" / "page" / "timeline.js"
    ).read_text().strip() in page
    assert "run kept in " in hpc3d("train", "--resume", folder, "--train.steps", "3", ranks=2)


def test_installed_package_starts_its_own_ranks_and_names_the_next_commands(hpc3d, tmp_path):
    printed = hpc3d("train", *SMALL, "--launch", 4, "--mesh.y", 4)
    (folder,) = (tmp_path / "results").iterdir()
    assert "4 ranks: y=4" in printed
    assert printed.splitlines()[-3:-1] == [
        f"next: python -m hpc3d.report {folder}",
        f"next: python -m hpc3d.plan {folder}/config.toml --ranks 4",
    ]


def test_installed_package_is_used_instead_of_the_source(installed, surrounding, tmp_path):
    ask = "import hpc3d; print(hpc3d.__file__)"
    path = run(installed.with_name("python"), "-c", ask, cwd=tmp_path)
    assert Path(path).is_relative_to(installed.parents[1])
    ask = "from hpc3d.training.run_folder import git_revision; print(repr(git_revision()))"
    assert run(installed.with_name("python"), "-c", ask, cwd=tmp_path) == "''\n"
