"""A run that begins with given weights: its folder, with a checkpoint before the first step."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.manifest import name_of
from hpc3d.checkpoints.sharded import InitialState, StoredPiece, complete, write_shard
from hpc3d.config.load import to_toml
from hpc3d.trace.segment import replacing, sync
from hpc3d.training.optimizers import optimizer_of

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.training.optimizer import StateSpec


def initial_state(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    specs: Sequence[StateSpec],
) -> InitialState:
    """The `InitialState` with values `read(name)` and an optimiser with the states `specs` that
    has seen nothing."""

    def states_of(name, shape):
        """(kind, shape, type) of each state of a parameter."""
        for spec in specs:
            if spec.of(name, shape):
                yield spec.name, spec.shape(shape), np.dtype(spec.dtype or dtype)

    pieces, offset = [], 0
    for name, shape in shapes.items():
        for kind, held, each in [("value", shape, dtype), *states_of(name, shape)]:
            pieces.append(StoredPiece(name, kind, name_of(each), offset, [whole_of(held).edges]))
            offset += prod(held) * each.itemsize

    def arrays():
        for name, shape in shapes.items():
            yield read(name).astype(dtype).ravel()
            for _, held, each in states_of(name, shape):
                yield np.zeros(prod(held), each)

    return InitialState(pieces, arrays(), offset)


def begin(
    run: Path, config: Config, read: Callable[[str], np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Make the folder of a run that `train --resume` takes; `read(name, model)` gives the value of
    a parameter, `model` being the section of `config`.  Returns {name: shape} of them.

    It gets its name when all of it is on disk.  ValueError if it is there and not empty.  A run in
    16 bits begins with values of 32, which its master copies keep.
    """
    if run.exists() and not (run.is_dir() and not any(run.iterdir())):
        raise ValueError(f"{run} exists: a run is never written over; name another folder")
    shapes, text = shapes_of(config.model), to_toml(config)
    header = {"run_id": run.name, "config": text, "position": None, "step": 0, "updates": 0}
    with _atomic_folder(run) as folder:
        _write(folder / "config.toml", text)
        _write(folder / "command.txt", shlex.join([sys.executable, *sys.argv]) + "\n")
        shard = folder / "checkpoints" / "step-00000000.tmp"
        shard.mkdir(parents=True)
        dtype = np.dtype("float64" if config.train.dtype == "float64" else "float32")
        specs = optimizer_of(config).STATES
        write_shard(
            shard, 0, initial_state(shapes, dtype, lambda name: read(name, config.model), specs)
        )
        if damage := complete(shard, 1, header, keep=1):
            raise ValueError(damage)
    return shapes


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder with a temporary name, which it loses if the block succeeds; else it is removed."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
