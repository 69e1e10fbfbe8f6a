"""Copy the input files and job scripts of hpc3d to a new folder, where they can be edited.

python -m hpc3d.init my-experiments
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.resources import as_file, files
from pathlib import Path

from hpc3d.config.package_data import MEASURED
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import reason_of, sanitized
from hpc3d.console.small_files import new_folder

_TEXT = """\
Create FOLDER with inputs/ (one TOML file per experiment, machine files, models and a text) and
jobs/ (Slurm scripts, which are submitted from FOLDER; see jobs/README.md). If one of the files
exists, nothing is written."""

_NOT = {"__pycache__", f"{MEASURED}.toml"}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return run("init", lambda: _init(options))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("init", _TEXT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty folder")
    return parser


def _init(options: Namespace) -> None:
    folder = options.folder
    package = files("hpc3d")
    with as_file(package / "share") as inputs, as_file(package / "jobs") as jobs:
        copies = [*_copies(inputs, folder / "inputs"), *_copies(jobs, folder / "jobs")]
        for _, target in copies:
            if target.exists():
                raise ValueError(
                    f"{target} already exists, so nothing was written; choose a new folder"
                )
        try:
            _copy(copies, folder / "results")
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot write there ({reason_of(error)}), so nothing was written"
            ) from None
    print(sanitized(f"{len(copies)} files written to {folder}. Next steps:"))
    print(sanitized(f"    cd {folder}"))
    print("    python -m hpc3d.train inputs/gpt-3d-8.toml --launch 8")
    print("    sbatch jobs/train.sbatch          # first adapt it to the cluster: jobs/README.md")


def _copy(copies: Sequence[tuple[Path, Path]], results: Path) -> None:
    """Copy the files and create the results folder; after an error, remove what was created."""
    with ExitStack() as created:
        # Slurm writes its logs to `results`, which must exist.
        for folder in (*(target.parent for _, target in copies), results):
            if not folder.exists():
                created.enter_context(new_folder(folder))
        try:
            for source, target in copies:
                shutil.copyfile(source, target)
        except BaseException:
            for _, target in copies:
                target.unlink(missing_ok=True)
            raise


def _copies(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    for path in sorted(source.rglob("*")):
        if path.is_file() and not _NOT & {*path.relative_to(source).parts}:
            yield path, target / path.relative_to(source)


if __name__ == "__main__":
    sys.exit(main())
