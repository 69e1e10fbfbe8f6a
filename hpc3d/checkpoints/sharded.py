"""Sharded checkpoints, which can be loaded with any parallel layout.

    checkpoints/step-00000123/  manifest.json, rank-00000.bin, ...      checkpoints/latest

Each rank writes one file with the slices of parameters and optimizer states that it owns; each
element is written once. A slice of a tensor consists of a few boxes (rectangular blocks).
Rank-local states (Parameters.own_states) are stored as vectors under the name of the rank, and
only a run with the same layout loads them. With local updates, every worker stores its own copy of
the arrays that differ between workers; worker 3 stores them as kinds such as "first.3", and worker
0 without a number. The manifest is written last. It lists the boxes and the SHA-256 hashes of all
files, so that each reader loads only the elements of its own blocks. A folder gets its final name
after all files are on disk, so a checkpoint is either complete or absent.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc3d.arrays.array import Array
from hpc3d.arrays.pool import from_host, on_host, to_host
from hpc3d.checkpoints.block_slices import BlockSlices, box_of, boxes, whole_of
from hpc3d.checkpoints.manifest import FORMAT, VERSION, name_of, narrowed, read_manifest, type_of
from hpc3d.checkpoints.moment_blocks import StoredMoment
from hpc3d.comm.mesh import COPIES, Mesh
from hpc3d.console.sanitize import reason_of
from hpc3d.console.small_files import naming, replacing, sync
from hpc3d.model.parameters import Parameter, Parameters
from hpc3d.ops.quantize import LEVELS
from hpc3d.tensor.layout import Layout
from hpc3d.training.optimizers.optimizer import MASTER, Optimizer
from hpc3d.training.optimizers.outer import OF_WORKERS, OUTER_STATES, common_kinds

_OUTER = tuple(spec.name for spec in OUTER_STATES)


class OwnElements(NamedTuple):
    """Elements of one parameter array that this rank stores.

    The array of elements is flat, or a view with the shape of the box. The elements are
    consecutive in the row-major order of the box `block`, starting at index `first`. Replicas
    store the same elements; `counts` is True on the one rank that writes them to checkpoints.
    `codes` is the kind of the codes that the elements scale, or "".
    """

    kind: str
    elements: Array
    block: BlockSlices
    first: int
    counts: bool
    codes: str = ""

    @property
    def boxes(self) -> list[BlockSlices]:
        return boxes(self.block, self.first, self.first + self.elements.size)

    def sections(self, item: Parameter, mesh: Mesh) -> Iterator[OwnElements]:
        """Yield the elements of each section of the parameter's layout separately."""
        if not item.layout.sections:
            yield self
            return
        block = self.elements.reshape(item.layout.block(item.shape, mesh))
        for here, there in item.layout.pieces(item.shape, mesh):
            yield self._replace(elements=block[here], block=box_of(there))


def _block_of(item: Parameter, layout: Layout, shape: Sequence[int], mesh: Mesh) -> BlockSlices:
    """Return the box of this rank in an array with the given layout and shape.

    The box excludes the padding rows of an embedding, and the corresponding elements of a vector
    that has one element per row of the embedding.
    """
    first, *others = layout.slices(shape, mesh)
    if item.rows:
        first = slice(first.start, max(first.start, min(first.stop, item.rows)))
    return box_of([first, *others])


class StoredPiece(NamedTuple):
    """Contiguous elements of one array, stored in a rank's file starting at byte `offset`."""

    name: str
    kind: str
    dtype: str
    offset: int
    boxes: list


class Snapshot:
    """Copy of this rank's shard of the training state in host memory.

    `pieces` describes the arrays, and `arrays` contains their bytes. `agreed` is true unless
    workers with local updates have different parameters.
    """

    def __init__(self, parameters: Parameters, optimizer: Optimizer, agreed: bool = True) -> None:
        self.pieces, self.arrays, self.nbytes = [], [], 0
        for name, kind, parts, elements in shares(parameters, optimizer, agreed):
            edges = [part.edges for part in parts]
            dtype = name_of(elements.dtype)
            self.pieces.append(StoredPiece(name, kind, dtype, self.nbytes, edges))
            self.arrays.append(to_host(elements).view(np.uint8))
            self.nbytes += elements.nbytes


def shares(
    parameters: Parameters, optimizer: Optimizer, agreed: bool = True
) -> Iterator[tuple[str, str, list[BlockSlices], Array]]:
    """Yield (name, kind, boxes, elements) for each array that this rank saves.

    `agreed` is as in `Snapshot`.
    """
    worker = parameters.mesh.coord(COPIES) if parameters.local else 0
    common = common_kinds(agreed)
    for item in parameters:
        for own in _own_elements(item, parameters, optimizer):
            if not own.counts or (worker and own.kind in common):
                continue
            for each in own.sections(item, parameters.mesh):
                parts, kind = each.boxes, f"{each.kind}.{worker}" if worker else each.kind
                size = sum(part.size for part in parts)
                yield item.name, kind, parts, each.elements.reshape(-1)[:size]
    for kind, state in parameters.own_states.items():
        yield _rank_name(parameters.mesh.rank), kind, [whole_of(state.shape)], state


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def _own_elements(
    item: Parameter, parameters: Parameters, optimizer: Optimizer | None
) -> Iterator[OwnElements]:
    """Yield the elements of a parameter and of its optimizer states that this rank stores."""
    slices, mesh = parameters.slices[item], parameters.mesh
    block = _block_of(item, item.layout, item.shape, mesh)
    where = block, slices.own_value.start - slices.value.start, parameters.counts(item)
    yield OwnElements("value", parameters.flat(item)[slices.own_value], *where)
    for spec, state in optimizer.states_of(item) if optimizer else ():
        if spec.elementwise:
            yield OwnElements(spec.name, state, *where)
        else:
            layout = spec.layout(item.updated_layout)
            shape = spec.shape(item.shape, mesh.count(item.updated_layout[-1]))
            block = _block_of(item, layout, shape, mesh)
            counts = parameters.counts_state(item, layout)
            yield OwnElements(spec.name, state, block, 0, counts, spec.codes)


# Writing


class InitialState(NamedTuple):
    """Initial state of a model, with the same interface as the `Snapshot` of a single rank.

    The arrays are generated one at a time.
    """

    pieces: list
    arrays: Iterator[np.ndarray]
    nbytes: int


def write_shard(folder: Path, rank: int, snapshot: Snapshot | InitialState) -> None:
    """Write rank-NNNNN.bin, then rank-NNNNN.json with the list of pieces and the SHA-256 hash.

    The JSON file signals to rank 0 that the data is on disk. Rank 0 may then rename the folder, so
    this function does not access the folder afterwards.
    """
    path, digest = folder / f"{_rank_name(rank)}.bin", hashlib.sha256()
    with replacing(path, crowded=True) as temporary, temporary.open("wb") as file:
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
    """Complete a checkpoint on rank 0, verify it, and remove older ones.

    Rank 0 waits for the files of all ranks, writes the manifest, renames the folder, records it as
    the latest, and reads it back. Of the older checkpoints, the newest `keep` - 1 and the one
    named `spared` are kept. If the new checkpoint is damaged, the problem is returned and no
    checkpoint is removed.

    Checkpoints of later steps, left over from an earlier execution of the run, are also kept.
    """
    paths = [folder / f"{_rank_name(rank)}.json" for rank in range(ranks)]
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    header = {"format": FORMAT, "version": VERSION, **header}
    with replacing(folder / "manifest.json") as temporary:
        temporary.write_text(json.dumps({**header, "files": files}), encoding="utf-8")
    for path in paths:
        path.unlink()
    final = folder.with_suffix("")
    if final.exists():  # incomplete, or left over from an earlier execution
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
    """Remove a checkpoint, manifest first, so that a partly deleted checkpoint is never valid.

    Subfolders are not removed, because hpc3d does not create any. On NFS, a file that a process
    still has open is renamed to .nfs... instead of being removed, so the folder remains.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):
        if not path.is_dir():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _describe_error(error: Any) -> Any:
    name = getattr(error, "filename", None)
    return f"{Path(name).name}: {reason_of(error)}" if name else error


def named(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def steps_of(parent: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    found = [path for path in Path(parent).glob("step-????????") if path.is_dir()]
    return sorted(found, reverse=True)


# Reading


class Checkpoint:
    """Checkpoint opened for reading; `header` is its manifest without the list of files.

    `workers` has one dict per worker that stored arrays of its own; with a single entry, there are
    no workers, or they have the same state. `sources` contains the arrays of one of them. If the
    workers have different parameters, `fill` returns their mean.

    Raises ValueError if the manifest is invalid or a file has the wrong size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            self.header, self.files = read_manifest(self.folder)
            self.workers = self._sources_of_workers()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.folder} is not a complete checkpoint: {_describe_error(error)}"
            ) from None
        self.sources = self.workers[0]

    def for_worker(self, number: int, workers: int) -> Checkpoint:
        """Return the checkpoint as worker `number` of `workers` reads it.

        If as many workers wrote the checkpoint, each reads its own arrays. Otherwise, a worker
        reads the mean of the values, and the optimizer states of one of the former workers.
        """
        found, before = copy(self), len(self.workers)
        found.sources = self.workers[0] | self.workers[number % before]
        found.workers = [found.sources] if workers == before else self.workers
        return found

    def _sources_of_workers(self):
        """Return, for each worker, a dict from (tensor name, kind) to (array, box) pairs."""
        found = {0: {}}
        for file in self.files:
            path = self.folder / file["file"]
            size = path.stat().st_size
            if not path.is_file() or size != file["bytes"]:
                raise ValueError(f"{path.name} has {size} bytes, not {file['bytes']}")
            data = np.memmap(path, "u1", "r") if size else np.empty(0, np.uint8)
            for name, full_kind, stored, offset, edges in file["pieces"]:
                kind, _, worker = full_kind.partition(".")
                sources, dtype = found.setdefault(int(worker or 0), {}), type_of(stored)
                for box in itertools.starmap(BlockSlices, edges):
                    nbytes = box.size * dtype.itemsize
                    elements = data[offset : offset + nbytes].view(dtype).reshape(box.shape)
                    sources.setdefault((name, kind), []).append((elements, box))
                    offset += nbytes
        if len(found) <= max(found):
            raise ValueError(f"it lacks the arrays of one of {max(found) + 1} workers")
        return [found[number] for number in sorted(found)]

    def exact(self, name: str) -> str:
        """Return the kind of the master copy if one is stored for a tensor, otherwise "value"."""
        return MASTER.name if (name, MASTER.name) in self.sources else "value"

    def shards(self, name: str, kind: str, shape: Sequence[int]) -> int:
        """Return the number of ranks that sharded the columns of a tensor with this shape.

        `kind` is a state whose arrays contain complete rows of a rank.
        """
        widths = [box.shape[-1] for _, box in self.sources.get((name, kind), ()) if box.size]
        return max(1, shape[-1] // widths[0]) if widths else 1

    def damage(self, number: int = 0, of: int = 1) -> str | None:
        """Check the SHA-256 hashes of the files `self.files[number::of]`.

        Returns a message about the first damaged file, or `None` if all checked files are intact.
        """
        for file in self.files[number::of]:
            with (self.folder / file["file"]).open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest != file["sha256"]:
                return f"{self.folder}: {file['file']} was changed or damaged on disk"
        return None

    def fill(self, array: np.ndarray, name: str, kind: str, box: BlockSlices) -> None:
        """Copy a box of a tensor to an array with the shape of the box.

        Raises ValueError if an element is missing or exceeds the range of the array's type.
        """
        differing = [each for each in self.workers if (name, kind) in each]
        if kind not in OF_WORKERS or len(differing) < 2:
            self._fill_from(self.sources, array, name, kind, box)
            return
        total, block = np.zeros(array.shape), np.empty(array.shape)
        for sources in differing:
            self._fill_from(sources, block, name, kind, box)
            total += block
        array[...] = total / len(differing)

    def _fill_from(
        self, sources: dict, array: np.ndarray, name: str, kind: str, box: BlockSlices
    ) -> None:
        absent = np.ones(array.shape, bool)
        for elements, part in sources.get((name, kind), ()):
            both = part.intersection(box)
            if both.size:
                found = elements[both.index_in(part)]
                tensor = f"{self.folder}: {name}, {kind}"
                array[both.index_in(box)] = narrowed(tensor, found, array.dtype)
                absent[both.index_in(box)] = False
        if missing := np.count_nonzero(absent):
            raise ValueError(
                f"{self.folder} lacks {missing} of {box.size} elements of {name}, {kind}: "
                "the checkpoint belongs to another model or optimizer"
            )


def restore(checkpoint: Checkpoint, parameters: Parameters, optimizer: Optimizer | None) -> None:
    """Load a rank's parameters and its optimizer, if any, from a checkpoint.

    The checkpoint may have a different layout and data type. Values and master copies are both
    read from the stored full-precision array. States of the outer optimizer may be missing.
    """
    for item, slices in parameters.slices.items():
        exact = checkpoint.exact(item.name)
        value, *states = _own_elements(item, parameters, optimizer)
        whole = value._replace(elements=parameters.flat(item)[slices.value], first=0)
        states = [
            each
            for each in states
            if each.kind not in _OUTER or (item.name, each.kind) in checkpoint.sources
        ]
        states = _fill_moved_blocks(checkpoint, item, states)
        for own in (whole, *states):
            stored = exact if own.kind in ("value", MASTER.name) else own.kind
            for each in own.sections(item, parameters.mesh):
                _fill(checkpoint, item.name, stored, each)


def _fill_moved_blocks(
    checkpoint: Checkpoint, item: Parameter, states: Sequence[OwnElements]
) -> list[OwnElements]:
    """Load the 8-bit moments whose blocks in the checkpoint differ from those of this rank.

    Returns the states that remain to be loaded.
    """
    by_kind, loaded = {each.kind: each for each in states}, set()
    scaled = [each for each in states if each.codes and each.elements.size]
    for scales, levels in zip(scaled, LEVELS, strict=False):
        codes = by_kind[scales.codes]
        kinds = codes.kind, scales.kind
        width = item.shape[-1] // checkpoint.shards(item.name, codes.kind, item.shape)

        def fill(array: np.ndarray, kind: str, box: BlockSlices) -> None:
            checkpoint.fill(array, item.name, kind, box)

        moment = StoredMoment(fill, kinds, width, levels)
        if not moment.fits(codes.block.shape[-1]):
            moment.quantize_to(codes.elements, scales.elements, codes.boxes)
            loaded |= {*kinds}
    return [each for each in states if each.kind not in loaded]


def restore_own(checkpoint: Checkpoint, parameters: Parameters) -> None:
    """Load the rank-local states from a checkpoint with the same layout."""
    for kind, state in parameters.own_states.items():
        own = OwnElements(kind, state, whole_of(state.shape), 0, True)
        _fill(checkpoint, _rank_name(parameters.mesh.rank), kind, own)


def _fill(checkpoint: Checkpoint, name: str, kind: str, own: OwnElements) -> None:
    """Load elements from the stored arrays of kind `kind`; padding elements are left unchanged."""
    elements = own.elements
    host, done = on_host(elements), 0
    if host.ndim > 1:
        checkpoint.fill(host[:, None], name, kind, own.block)
    for part in own.boxes if host.ndim == 1 else ():
        checkpoint.fill(host[done : done + part.size].reshape(part.shape), name, kind, part)
        done += part.size
    if host is not elements:
        from_host(elements, host)
