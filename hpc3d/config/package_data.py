"""Find data files shipped with hpc3d by name: inputs, machines, texts, published measurements.

In the source tree, hpc3d/share is a symbolic link to inputs/. In a wheel, hpc3d/share is a folder
with copies of these files.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

_INPUTS, _MODEL = "inputs", "config.json"


class Kind(NamedTuple):
    """Kind of TOML file: its name in messages, its folder in inputs/, and subfolders to search."""

    title: str
    folder: str
    below: tuple[str, ...] = ()


INPUT, MACHINE = Kind("input", "", ("models",)), Kind("machine", "machines")
DEFAULT_MACHINE = "h100"  # default of --machine
MEASURED = "this-machine"  # name of the machine file that `bench calibrate` writes


def shipped(name: Path | str = "") -> Path:
    """Return the path of the shipped file or folder `name`."""
    from importlib.resources import files

    return files("hpc3d") / "share" / name


def machine_in_words(name: str, option: str | None) -> str:
    """Return the name of a machine, marked as the default if the `option` --machine is unset."""
    return name if option else f"{name} (the default machine)"


def default_machine() -> Path:
    """Return the path of the shipped machine file named DEFAULT_MACHINE."""
    return shipped(f"{MACHINE.folder}/{DEFAULT_MACHINE}.toml")


def find(word: str, kind: Kind) -> Path:
    """Find a TOML file by its name or path; the suffix .toml is optional.

    An existing path takes precedence, then inputs/ in the current folder, then the shipped files.
    Raises ValueError if no file is found; if `word` is not a path, with all known names.
    """
    known, name = file_names(kind), str(Path(word)).removesuffix(".toml")
    for folder in (*Path(_INPUTS, kind.folder).parts, *kind.below):
        name = name.removeprefix(f"{folder}/")
    for path in (word, f"{word}.toml", known.get(name, "")):
        if os.path.exists(path) and not os.path.isdir(path):
            return Path(path)
    if (stored := input_of(word)) != word:
        raise ValueError(f"{word}: is the folder of a run; use {stored}")
    if kind is INPUT:
        refuse_model(word)
    wrong = "is a folder" if os.path.isdir(word) else f"no such {kind.title}"
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? Otherwise, " if near else ""
    remedy = f"specify a path, or one of {', '.join(sorted(known))}"
    if "/" in (path := str(word)) or path.endswith(".toml"):
        remedy = "specify a file" if os.path.isdir(word) else "specify an existing path"
    raise ValueError(f"{word or repr(word)}: {wrong}; {hint}{remedy}")


def refuse_model(path: Path | str) -> None:
    """Raise ValueError if `path` is a Hugging Face model, or its config.json or weights."""
    source = Path(path).parent if Path(path).name == _MODEL else path
    weights = Path(path).suffix == ".safetensors" and os.path.isfile(path)
    if weights or os.path.isfile(os.path.join(source, _MODEL)):
        raise ValueError(
            f"{path}: a model of Hugging Face Transformers, not a run or an input file; run "
            f"python -m hpc3d.checkpoint import {source} -o results/NEW, then use results/NEW "
            "(train: --resume results/NEW)"
        )


def input_of(word: Path | str) -> Path | str:
    """Return the stored configuration if `word` is the folder of a run, and `word` otherwise."""
    path = os.path.join(word, "config.toml")
    return path if word and os.path.exists(path) else word


def file_names(kind: Kind) -> dict[str, Path]:
    """Return a dict that maps the name of each known file of this kind to its path."""
    roots = shipped(kind.folder), Path(_INPUTS, kind.folder)
    folders = [root / folder for root in roots for folder in (*kind.below, "")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def text_path(word: Path | str) -> Path | str:
    """Return the path of a training or validation text.

    If the path `word` does not exist and hpc3d ships a text of this name, the result is the path
    of the shipped text; otherwise, the result is `word`.
    """
    parts = Path(word).parts
    name = Path(*parts[parts[:1] == (_INPUTS,) :])
    there = shipped(name)
    known = ".." not in parts and os.path.exists(there)
    return there if known and not os.path.exists(word) else word


def new_path(name: str, kind: Kind) -> Path:
    """Return a path for a new file, chosen so that `find` will find the file by `name`.

    The path is in the subfolder of inputs/ for this kind of file if this subfolder exists,
    otherwise in the current folder.
    """
    folder = Path(_INPUTS, kind.folder)
    return (folder if folder.is_dir() else Path()) / f"{name}.toml"
