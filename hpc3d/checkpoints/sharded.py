"""The state of a run on disk, in pieces that any layout can read.

    checkpoints/step-00000123/  manifest.json, rank-00000.bin, ...      checkpoints/latest

A rank writes the parameters and optimiser states whose copy on it counts, each once: what it holds
of a tensor is a few boxes of it.  What a rank alone keeps (Parameters.own_states) is a vector by
the rank's name, for runs on the same layout.  The manifest, written last, has the boxes of all
files and their SHA-256, so a reader takes what its own blocks need, wherever it lies.  A folder
gets its name when all of it is on disk: a checkpoint is whole or not there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import from_host, on_host, to_host
from hpc3d.checkpoints.block_slices import BlockSlices, box_of, boxes, whole_of
from hpc3d.checkpoints.manifest import FORMAT, VERSION, name_of, read_manifest, type_of
from hpc3d.plain import why
from hpc3d.trace.segment import naming, replacing, sync
from hpc3d.training.optimizer import MASTER

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.mesh import Mesh
    from hpc3d.model.parameters import Parameter, Parameters
    from hpc3d.training.optimizer import Optimizer


def _block_of(item: Parameter, mesh: Mesh) -> BlockSlices:
    """The box of this rank's block of a parameter; without the padding of a table, or of a
    vector with an element for each of its rows."""
    first, *others = item.layout.slices(item.shape, mesh)
    if item.rows:
        first = slice(first.start, max(first.start, min(first.stop, item.rows)))
    return box_of([first, *others])


class StoredPiece(NamedTuple):
    """What a rank holds of one array of a tensor: consecutive elements, at `offset` bytes."""

    name: str
    kind: str
    dtype: str
    offset: int
    boxes: list


class Snapshot:
    """A copy of this rank's share of the state, on the host: `pieces` and the bytes of each."""

    def __init__(self, parameters: Parameters, optimizer: Optimizer) -> None:
        self.pieces, self.arrays, offset = [], [], 0
        for name, kind, parts, elements in shares(parameters, optimizer):
            edges = [part.edges for part in parts]
            self.pieces.append(StoredPiece(name, kind, name_of(elements.dtype), offset, edges))
            self.arrays.append(to_host(elements).view(np.uint8))
            offset += elements.nbytes

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def shares(
    parameters: Parameters, optimizer: Optimizer
) -> Iterator[tuple[str, str, list[BlockSlices], Array]]:
    """(name, kind, boxes, their elements) of all arrays whose copy on this rank counts."""
    for item, place in parameters.places.items():
        if parameters.counts(item):
            block, first = _block_of(item, parameters.mesh), place.own_value.start
            for kind, array in arrays(item, parameters, optimizer):
                start = first - place.value.start
                parts = boxes(block, start, start + len(array))
                yield item.name, kind, parts, array[: sum(part.size for part in parts)]
    for kind, state in parameters.own_states.items():
        yield _rank_name(parameters), kind, [whole_of(state.shape)], state


def _rank_name(parameters: Parameters) -> str:
    """What stands for a tensor's name where an array is of a rank."""
    return f"rank-{parameters.mesh.rank:05d}"


def arrays(
    item: Parameter, parameters: Parameters, optimizer: Optimizer
) -> Iterator[tuple[str, Array]]:
    """(kind, this rank's own elements) of a parameter."""
    place = parameters.places[item]
    yield "value", parameters.value[place.own_value]
    for kind, state in _states_of(item, optimizer).items():
        yield kind, state[place.state]


def _states_of(item: Parameter, optimizer: Optimizer | None) -> Mapping[str, Array]:
    """Name -> flat array of what an optimiser keeps of a parameter."""
    return optimizer.states if optimizer and not item.sign_rate else {}


# Writing


class InitialState(NamedTuple):
    """The state of a model that has made no step: what `Snapshot` is of a run, for one rank that
    holds all of it.  The arrays are made one after the other."""

    pieces: list
    arrays: Iterator[np.ndarray]
    nbytes: int


def write_shard(folder: Path, rank: int, snapshot: Snapshot | InitialState) -> None:
    """rank-00000.bin and, when it is on disk, rank-00000.json with its pieces and SHA-256.

    The second is a message to rank 0, which may give the folder its name as soon as it sees it:
    nothing here touches the folder afterwards.
    """
    path, digest = folder / f"rank-{rank:05d}.bin", hashlib.sha256()
    with replacing(path) as temporary, temporary.open("wb") as file:
        for array in snapshot.arrays:
            digest.update(array)
            file.write(array)
    index = {"file": path.name, "bytes": snapshot.nbytes, "sha256": digest.hexdigest()}
    index["pieces"] = snapshot.pieces
    message = path.with_suffix(".json.tmp")
    with naming(message):
        message.write_text(json.dumps(index), encoding="utf-8")
    os.replace(message, path.with_suffix(".json"))


def complete(
    folder: Path, ranks: int, header: Mapping[str, Any], keep: int, spared: str | None = None
) -> str | None:
    """Rank 0: wait for the files of all ranks, write the manifest, give the folder its name, name
    it the latest, read it again, and remove all before it but `keep` - 1 and the one that is named
    `spared`; or return what is wrong with it, and remove none.

    Those of later steps are what an attempt left that did not go on from them: they stay.
    """
    paths = [folder / f"rank-{rank:05d}.json" for rank in range(ranks)]
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    header = {"format": FORMAT, "version": VERSION, **header}
    with replacing(folder / "manifest.json") as temporary:
        temporary.write_text(json.dumps({**header, "files": files}), encoding="utf-8")
    for path in paths:
        path.unlink()
    final = folder.with_suffix("")
    if final.exists():  # one that was not whole, or that another attempt has passed
        _discard(final)
    os.replace(folder, final)
    sync(final.parent)
    with replacing(final.parent / "latest") as temporary:
        temporary.write_text(final.name + "\n", encoding="utf-8")
    if damage := Checkpoint(final).damage():
        return damage
    before = [path for path in steps_of(final.parent) if path.name < final.name]
    for old in before[keep - 1 :]:
        if old.name != spared:
            _discard(old)
    return None


def _discard(folder: Path) -> None:
    """Remove a checkpoint: first its manifest, so that what is left of it is not a checkpoint.  A
    folder that someone made in it stays, and so does what NFS keeps of files that are open."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):
        if not path.is_dir():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _describe_error(error: Any) -> Any:
    """An error in words, with the name of its file."""
    name = getattr(error, "filename", None)
    return f"{Path(name).name}: {why(error)}" if name else error


def named(step: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step-{step:08d}"


def steps_of(parent: Path) -> list[Path]:
    """The checkpoints of a run, the newest first."""
    found = [path for path in Path(parent).glob("step-????????") if path.is_dir()]
    return sorted(found, reverse=True)


# Reading


class Checkpoint:
    """A checkpoint to be read from; `header` is its manifest without the files.

    ValueError, which names what is wrong, if the manifest or a file's size is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            self.header, self.files = read_manifest(self.folder)
            self._check_sizes()
            self.sources = self._sources()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.folder} is no whole checkpoint: {_describe_error(error)}"
            ) from None

    def _check_sizes(self):
        for file in self.files:
            path = self.folder / file["file"]
            size = path.stat().st_size
            if not path.is_file() or size != file["bytes"]:
                raise ValueError(f"{path.name} has {size} bytes, not {file['bytes']}")

    def _sources(self):
        """(name, kind) -> [(array of elements, box)]."""
        sources = {}
        for file in self.files:
            data = np.memmap(self.folder / file["file"], "u1", "r") if file["bytes"] else None
            for name, kind, stored, offset, parts in file["pieces"]:
                dtype = type_of(stored)
                for part in itertools.starmap(BlockSlices, parts):
                    nbytes = part.size * dtype.itemsize
                    elements = data[offset : offset + nbytes].view(dtype)
                    found = elements.reshape(part.shape), part
                    sources.setdefault((name, kind), []).append(found)
                    offset += nbytes
        return sources

    def exact(self, name: str) -> str:
        """The kind that has the values of a tensor in full: their master copies, where there are
        any."""
        return MASTER.name if (name, MASTER.name) in self.sources else "value"

    def damage(self, number: int = 0, of: int = 1) -> str | None:
        """What is wrong with the first bad file of every `of`-th from `number` on; None if none
        was changed."""
        for file in self.files[number::of]:
            with (self.folder / file["file"]).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file["sha256"]:
                return f"{self.folder}: {file['file']} was changed or damaged on disk"
        return None

    def fill(self, array: np.ndarray, name: str, kind: str, box: BlockSlices) -> None:
        """Copy a box of a tensor into an array of its shape; ValueError for a gap."""
        absent = np.ones(array.shape, bool)
        for elements, part in self.sources.get((name, kind), ()):
            both = part.intersection(box)
            if both.size:
                array[both.index_in(box)] = elements[both.index_in(part)]
                absent[both.index_in(box)] = False
        if missing := np.count_nonzero(absent):
            raise ValueError(
                f"{self.folder} lacks {missing} of {box.size} elements of {name}, {kind}: "
                "it is of another model or optimiser"
            )


def restore(checkpoint: Checkpoint, parameters: Parameters, optimizer: Optimizer | None) -> None:
    """Fill the parameters and the optimiser of a rank, if it has one, whatever layout wrote the
    checkpoint and in whatever type: values and their master copies come from those that are there
    in full."""
    for item, place in parameters.places.items():
        block, exact = _block_of(item, parameters.mesh), checkpoint.exact(item.name)
        _fill_flat(checkpoint, parameters.value[place.value], item.name, exact, block, 0)
        first = place.own_value.start - place.value.start
        for kind, state in _states_of(item, optimizer).items():
            stored = exact if kind == MASTER.name else kind
            _fill_flat(checkpoint, state[place.state], item.name, stored, block, first)


def restore_own(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Fill what this rank alone keeps from a checkpoint of the same layout."""
    for kind, state in parameters.own_states.items():
        block = whole_of(state.shape)
        _fill_flat(checkpoint, state, _rank_name(parameters), kind, block, 0)


def _fill_flat(
    checkpoint: Checkpoint, flat: Array, name: str, kind: str, block: BlockSlices, first: int
) -> None:
    """Fill consecutive elements of a block, from its element `first` on; padding stays."""
    host, done = on_host(flat), 0
    for part in boxes(block, first, first + len(flat)):
        checkpoint.fill(host[done : done + part.size].reshape(part.shape), name, kind, part)
        done += part.size
    if host is not flat:
        from_host(flat, host)
