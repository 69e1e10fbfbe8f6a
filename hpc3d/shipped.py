"""What comes with the program: inputs, machines, texts and published rows, found by name.

In the source they lie in inputs/, of which hpc3d/share is a link; a wheel has files there.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

_INPUTS = "inputs"


class Kind(NamedTuple):
    """Files of TOML: what users call one, their folder in inputs/, and those in it that have more
    of them."""

    title: str
    folder: str
    below: tuple[str, ...] = ()


INPUT, MACHINE = Kind("input", "", ("models",)), Kind("machine", "machines")
DEFAULT_MACHINE = "h100"  # if none is named
MEASURED = "this-machine"  # the machine that `bench calibrate` writes


def shipped(name: Path | str = "") -> Path:
    """The path of what comes with the program as `name` in inputs/."""
    from importlib.resources import files

    return files("hpc3d") / "share" / name


def default_machine() -> Path:
    """The path of the shipped file of DEFAULT_MACHINE."""
    return shipped(f"{MACHINE.folder}/{DEFAULT_MACHINE}.toml")


def find(word: str, kind: Kind) -> Path:
    """The path of the file of a `kind` that `word` names: a path with or without .toml, or a name.

    Names are those of the files in inputs/ of the current folder, then of those that are shipped.
    A path that exists wins.  ValueError, with the names, where there is no such file.
    """
    known = names(kind)
    for path in (word, f"{word}.toml", known.get(_name_of(word, kind), "")):
        if os.path.exists(path) and not os.path.isdir(path):
            return Path(path)
    raise ValueError(_unknown(word, kind, known))


def names(kind: Kind) -> dict[str, Path]:
    """{name: path} of the files of a kind."""
    places = shipped(kind.folder), Path(_INPUTS, kind.folder)
    folders = [place / folder for place in places for folder in (*kind.below, "")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def _name_of(word: Path | str, kind: Kind) -> str:
    """`word` without what says where shipped files of a kind lie."""
    name = str(Path(word)).removesuffix(".toml")
    for folder in (*Path(_INPUTS, kind.folder).parts, *kind.below):
        name = name.removeprefix(f"{folder}/")
    return name


def _unknown(word: Path | str, kind: Kind, known: Collection[str]) -> str:
    """What is wrong with a `word` that names no file of a kind, and what it may stand for."""
    wrong = "is a folder" if os.path.isdir(word) else f"there is no such {kind.title}"
    near = get_close_matches(_name_of(word, kind), known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{word}: {wrong}; {hint}name a file, or one of {', '.join(sorted(known))}"


def text(word: Path | str) -> Path | str:
    """`word`, a path, or the path of what is shipped by this name, as inputs/corpus is."""
    parts = Path(word).parts
    name = Path(*parts[parts[:1] == (_INPUTS,) :])
    there = shipped(name)
    known = ".." not in parts and os.path.exists(there)
    return there if known and not os.path.exists(word) else word


def place(name: str, kind: Kind) -> Path:
    """Where a file of a kind that the program makes is found by `name`: in inputs/ if the current
    folder has that, else there itself."""
    folder = Path(_INPUTS, kind.folder)
    return (folder if folder.is_dir() else Path()) / f"{name}.toml"
