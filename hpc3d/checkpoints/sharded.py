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
from collections.abc import Iterator, Mapping, Sequence
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
    from hpc3d.tensor.layout import Layout
    from hpc3d.training.optimizer import Optimizer


class OwnElements(NamedTuple):
    """This rank's own elements of an array of a parameter, flat: those of the box `block` from its
    element `first` on; and whether they are the copy that `counts`."""

    kind: str
    elements: Array
    block: BlockSlices
    first: int
    counts: bool

    @property
    def boxes(self) -> list[BlockSlices]:
        return boxes(self.block, self.first, self.first + len(self.elements))


def _block_of(item: Parameter, layout: Layout, shape: Sequence[int], mesh: Mesh) -> BlockSlices:
    """The box of this rank's block of what has a `layout` and a `shape`; without the padding of a
    table, or of a vector with an element for each of its rows."""
    first, *others = layout.slices(shape, mesh)
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
    for item in parameters:
        for own in _own_elements(item, parameters, optimizer):
            if own.counts:
                parts = own.boxes
                size = sum(part.size for part in parts)
                yield item.name, own.kind, parts, own.elements[:size]
    for kind, state in parameters.own_states.items():
        yield _rank_name(parameters), kind, [whole_of(state.shape)], state


def _rank_name(parameters: Parameters) -> str:
    """What stands for a tensor's name where an array is of a rank."""
    return f"rank-{parameters.mesh.rank:05d}"


def _own_elements(
    item: Parameter, parameters: Parameters, optimizer: Optimizer | None
) -> Iterator[OwnElements]:
    """Those of the value of a parameter, and of all that an optimiser keeps of it."""
    place, mesh = parameters.places[item], parameters.mesh
    block = _block_of(item, item.layout, item.shape, mesh)
    where = block, place.own_value.start - place.value.start, parameters.counts(item)
    yield OwnElements("value", parameters.flat(item)[place.own_value], *where)
    for spec, state in optimizer.states_of(item) if optimizer else ():
        if spec.elementwise:
            yield OwnElements(spec.name, state, *where)
        else:
            layout = spec.layout(item.updated_layout)
            block = _block_of(item, layout, spec.shape(item.shape), mesh)
            counts = parameters.counts_state(item, layout)
            yield OwnElements(spec.name, state, block, 0, counts)


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
            path, empty = self.folder / file["file"], np.empty(0, np.uint8)
            data = np.memmap(path, "u1", "r") if file["bytes"] else empty
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
        exact = checkpoint.exact(item.name)
        value, *states = _own_elements(item, parameters, optimizer)
        whole = value._replace(elements=parameters.flat(item)[place.value], first=0)
        _fill_flat(checkpoint, item.name, exact, whole)
        for own in states:
            _fill_flat(checkpoint, item.name, exact if own.kind == MASTER.name else own.kind, own)


def restore_own(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Fill what this rank alone keeps from a checkpoint of the same layout."""
    for kind, state in parameters.own_states.items():
        own = OwnElements(kind, state, whole_of(state.shape), 0, True)
        _fill_flat(checkpoint, _rank_name(parameters), kind, own)


def _fill_flat(checkpoint: Checkpoint, name: str, kind: str, own: OwnElements) -> None:
    """Fill elements with those of a stored `kind`; padding stays."""
    flat = own.elements
    host, done = on_host(flat), 0
    for part in own.boxes:
        checkpoint.fill(host[done : done + part.size].reshape(part.shape), name, kind, part)
        done += part.size
    if host is not flat:
        from_host(flat, host)
