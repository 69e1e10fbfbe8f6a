"""Create a run folder with a step-0 checkpoint that contains the given weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np

from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.manifest import name_of
from hpc3d.checkpoints.sharded import InitialState, StoredPiece, complete, write_shard
from hpc3d.config.input_file import Config
from hpc3d.config.load import to_toml
from hpc3d.console.small_files import sync, temporary_of
from hpc3d.training.optimizers.catalog import optimizer_of
from hpc3d.training.optimizers.optimizer import StateSpec
from hpc3d.training.run_folder import note_command, write_text


def initial_state(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    specs: Sequence[StateSpec],
) -> InitialState:
    """Return a state with parameter values from `read(name)` and optimizer states set to zero."""
    arrays = []  # (name, kind, shape, dtype)
    for name, shape in shapes.items():
        arrays.append((name, "value", shape, dtype))
        for spec in specs:
            if spec.of(name, shape):
                of_state = spec.name, spec.shape(shape), np.dtype(spec.dtype or dtype)
                arrays.append((name, *of_state))
    pieces, offset = [], 0
    for name, kind, shape, each in arrays:
        pieces.append(StoredPiece(name, kind, name_of(each), offset, [whole_of(shape).edges]))
        offset += prod(shape) * each.itemsize
    values = (
        read(name).astype(each).ravel() if kind == "value" else np.zeros(prod(shape), each)
        for name, kind, shape, each in arrays
    )
    return InitialState(pieces, values, offset)


def begin(
    run: Path, config: Config, read: Callable[[str, Config], np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Create a run folder for `train --resume`; return a dict from parameter name to shape.

    `read(name, config)` returns the initial value of a parameter.

    The folder is renamed to its final name once all files are on disk. Raises ValueError if the
    folder exists and is not empty. A 16-bit run starts from float32 values, which become the
    master copies.
    """
    if run.exists() and not (run.is_dir() and not any(run.iterdir())):
        raise ValueError(
            f"{run} already exists, and runs are never overwritten; use another folder"
        )
    shapes, text = shapes_of(config.model), to_toml(config)
    header = {"run_id": run.name, "config": text, "position": None, "step": 0, "updates": 0}
    with _atomic_folder(run) as folder:
        write_text(folder / "config.toml", text)
        note_command(folder)
        shard = folder / "checkpoints" / "step-00000000.tmp"
        shard.mkdir(parents=True)
        dtype = np.dtype("float64" if config.train.dtype == "float64" else "float32")
        specs = optimizer_of(config).STATES
        write_shard(shard, 0, initial_state(shapes, dtype, lambda name: read(name, config), specs))
        if damage := complete(shard, 1, header, keep=1):
            raise ValueError(damage)
    return shapes


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Create a folder with a temporary name; rename it on success, remove it on failure."""
    temporary = temporary_of(folder)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
