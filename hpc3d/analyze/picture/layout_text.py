"""Text form of the picture of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

from hpc3d.analyze.picture.rank_blocks import MOST_DRAWN
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.tensor.layout import Layout

if TYPE_CHECKING:
    from hpc3d.analyze.picture.rank_blocks import Block, RankBlocks, RankRow, Unit
    from hpc3d.model.parameters import Parameter

USES = "axis", "ranks", "parameters", "gradients", "optimizer", "activations"
_DIMENSIONS = {1: ("elements",), 2: ("rows", "columns"), 3: ("rows", "experts", "columns")}


def lines(blocks: RankBlocks, matrix: str | None = None) -> Iterator[str]:
    """Yield the lines of the text form.

    Parameters
    ----------
    blocks
        Layers and blocks of the ranks.
    matrix
        Name of a parameter whose blocks are listed (default: the largest matrix of the first
        block).

    Raises
    ------
    ValueError
        If the model has no parameter of this name.
    """
    item = blocks.matrix(matrix)
    yield title(blocks)
    if uses := blocks.uses():
        yield ""
        yield from _table([USES, *[tuple(map(str, each)) for each in uses]])
    yield ""
    yield from _ranks(blocks)
    yield ""
    yield from _owners(blocks, item)


def title(blocks: RankBlocks) -> str:
    """Return the name of the input, the number of ranks, the mesh and the techniques."""
    config, sizes = blocks.config, blocks.grid.sizes
    mesh = " ".join(f"{axis}={sizes[axis]}" for axis in blocks.axes)
    parallel = config.parallel
    parts = [counted(blocks.grid.size, "rank"), mesh or "serial"]
    parts += [parallel.way] * (config.mesh.tensor_ranks() > 1)
    parts += [f"schedule {parallel.schedule}"] * (config.mesh.p > 1)
    parts += [f"context {parallel.context}"] * (config.mesh.c > 1)
    parts += [parallel.sharding] * (parallel.zero > 0)
    return sanitized(f"{config.name}: {', '.join(parts)}")


def names_of(units: Sequence[Unit]) -> str:
    """Return the units of a rank, such as "embedding, layers 0-3", with runs of layers joined."""
    found = []
    for (is_layer, _), run in groupby(enumerate(units), _run):
        run = [unit for _, unit in run]
        layers = f"{run[0].layer}-{run[-1].layer}"
        several = is_layer and len(run) > 1
        found += [f"layers {layers}"] if several else [unit.name for unit in run]
    return ", ".join(found) or "no layers"


def _run(pair):
    """Return a key that is equal for consecutive layers."""
    place, unit = pair
    return unit.layer is not None, 0 if unit.layer is None else unit.layer - place


def described(blocks: RankBlocks, item: Parameter) -> str:
    """Return a parameter's name, shape and layout, such as "up.weight [384, 1536] = [k_zx, n_y]".

    The layout lists only mesh axes that have several ranks.
    """
    names = ["k", "experts", "n"] if len(item.shape) == 3 else ["k", "n"][-len(item.shape) :]
    dims = (" ".join(axis for axis in dim if axis in blocks.axes) for dim in item.layout)
    owned = " ".join(axis for axis in item.layout.owned if axis in blocks.axes)
    layout = Layout(*dims, owned=owned).indexed(names)
    note = "; columns in the order of the ranks" if item.layout.sections else ""
    return f"{item.name} {list(item.shape)}, layout {layout}{note}"


def notes_on(blocks: RankBlocks, item: Parameter) -> Iterator[str]:
    """Yield remarks on the list of blocks of a parameter."""
    if copied := blocks.copied(item):
        yield f"replicated along {', '.join(copied)}"
    count = prod(blocks.grid.sizes[axis] for axis in blocks.spanned(item))
    if blocks.grid.size > MOST_DRAWN < count:
        yield f"first {MOST_DRAWN} of {count} ranks that store different blocks"
    elif blocks.grid.size > MOST_DRAWN and copied:
        yield "one replica is listed"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers with runs of three or more joined, such as "0 2-5 9"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in found
    )


def _ranks(blocks: RankBlocks) -> Iterator[str]:
    """Yield the table of ranks, with a dashed line between two hosts and a heading per example."""
    head = "rank", *blocks.axes, "stored parameters", "layers"
    rows = [[_cells(blocks, rank) for rank in row.ranks] for row in blocks.rows]
    first, *table = _table([head, *[cells for row in rows for cells in row]], last=True)
    yield first
    for row in blocks.rows:
        if row.axis:
            yield example(blocks, row)
        for rank, after in pairwise((*row.ranks, None)):
            yield table.pop(0)
            if blocks.hosts and not row.axis:
                following = rank + 1 if after is None else after
                if following < blocks.grid.size and differ(blocks, rank, following):
                    yield f"- - - - host {blocks.hosts[following]} - - - -"


def example(blocks: RankBlocks, row: RankRow) -> str:
    """Return the heading of the example of an axis."""
    size, shown = blocks.grid.sizes[row.axis], len(row.ranks)
    cut = f" (the first {shown - 1} and the last)" * (size > shown)
    return f"along {row.axis}, {size} ranks{cut}:"


def differ(blocks: RankBlocks, rank: int, other: int) -> bool:
    """Return True if two ranks are on different hosts; False if the hosts are unknown."""
    return bool(blocks.hosts) and blocks.hosts[rank] != blocks.hosts[other]


def _cells(blocks: RankBlocks, rank: int) -> tuple[str, ...]:
    coords = blocks.grid.coords(rank)
    places = [str(coords[axis]) for axis in blocks.axes]
    return str(rank), *places, f"{blocks.stored(rank):,}", names_of(blocks.units(rank))


def _owners(blocks: RankBlocks, item: Parameter) -> Iterator[str]:
    """Yield the blocks of a parameter and the ranks that store them."""
    owners = blocks.owners(item)
    yield described(blocks, item)
    head = *_DIMENSIONS[len(item.shape)], "stored by ranks"
    rows = [(*_bounds(block), in_ranges(ranks)) for block, ranks in owners.items()]
    yield from _table([head, *rows], last=True)
    yield from notes_on(blocks, item)


def _bounds(block: Block) -> list[str]:
    return [f"{start}:{stop}" for start, stop in block]


def _table(rows: Sequence[Sequence[str]], last: bool = False) -> Iterator[str]:
    """Yield rows with aligned columns; the last column is aligned to the left if `last`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        *cells, end = (f"{cell:>{width}}" for cell, width in zip(row, widths))
        yield "  ".join([*cells, row[-1] if last else end]).rstrip()
