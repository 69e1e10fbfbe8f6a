"""Boxes of the ranks: the layers of each rank, and the part of each layer that it stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.picture.layout_text import differ, example, names_of
from hpc3d.analyze.picture.svg_elements import box, line, text

if TYPE_CHECKING:
    from hpc3d.analyze.picture.rank_blocks import Block, RankBlocks, Unit
    from hpc3d.model.parameters import Parameter

WIDTH = 62  # of a box
_MOST = 6  # layers of a box that are drawn separately
_LINE, _GLYPH = 18, (26, 15)  # height of the row of a layer, and size of its matrix


class _Row(NamedTuple):
    """Layers that are drawn as one matrix; `color` is the index of their color, or -1 for gray."""

    label: str
    color: int
    matrix: Parameter


def drawing(
    blocks: RankBlocks, corner: tuple[float, float], colors: Sequence[str]
) -> tuple[list[str], float]:
    """Return the elements of all boxes, and the lower end of the boxes.

    Parameters
    ----------
    blocks
        Layers and blocks of the ranks.
    corner
        Upper left corner (x, y).
    colors
        Colors of layers, which repeat.
    """
    drawn = {rank: _rows_of(blocks.units(rank)) for rank in blocks.drawn}
    top = 17 + 10 * -(-len(blocks.axes) // 3)  # of the first layer of a box
    height = top + _LINE * max(map(len, drawn.values())) + 4
    left, y, found = *corner, []
    for number, row in enumerate(blocks.rows):
        if row.axis:
            y += 16
            found.append(text(left, y - 5, example(blocks, row), "bold"))
        for column, rank in enumerate(row.ranks):
            place = left + WIDTH * column, y
            found += _box(blocks, rank, place, colors, (drawn[rank], top))
        found += _borders(blocks, number, (left, y), height)
        y += height
    return found, y


def _rows_of(units: Sequence[Unit]) -> list[_Row]:
    """Return the rows of a box: one per layer, or one per model chunk if there are many layers."""
    runs: list[list[Unit]] = []
    for unit in units:
        last = runs[-1][-1] if runs else None
        joined = last and None not in (last.layer, unit.layer) and last.chunk == unit.chunk
        if joined and len(units) > _MOST:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    rows = []
    for run in runs[:_MOST]:
        first, label = run[0], names_of(run).split()[-1]
        color = -1 if first.layer is None else first.layer
        color = first.chunk if len(run) > 1 else color
        label = {"embedding": "emb"}.get(label, label)
        rows.append(_Row(label, color, first.matrix))
    return rows


def _box(
    blocks: RankBlocks,
    rank: int,
    corner: tuple[float, float],
    colors: Sequence[str],
    inside: tuple[Sequence[_Row], float],
) -> Iterator[str]:
    """Yield the elements of the box of a rank: its number, its coordinates and its layers."""
    (x, y), (rows, top) = corner, inside
    yield text(x + 5, y + 13, str(rank), "bold")
    coords = blocks.grid.coords(rank)
    places = [f"{axis}{coords[axis]}" for axis in blocks.axes]
    for first in range(0, len(places), 3):
        words = " ".join(places[first : first + 3])
        yield text(x + 5, y + 24 + 10 * first // 3, words, "small soft")
    for number, row in enumerate(rows):
        place = x + 34, y + top + _LINE * number
        size = "tiny" if len(row.label) > 5 else "small"
        yield text(x + 32, place[1] + 11, row.label, f"{size} end")
        color = colors[row.color % len(colors)] if row.color >= 0 else "#8a8f98"
        block = blocks.block(rank, row.matrix)
        yield box(place, _GLYPH, "all", color)
        for low, high in fractions(row.matrix, block) if block else ():
            yield _part(place, low, high, color)
        yield box(place, _GLYPH, "edge")


def _part(corner, low, high, color):
    """Return the filled part of a matrix, which is at least two pixels wide and high."""
    (x, y), (width, height) = corner, _GLYPH
    size = max(2, (high[0] - low[0]) * width), max(2, (high[1] - low[1]) * height)
    place = min(low[0] * width, width - 2), min(low[1] * height, height - 2)
    return box((x + place[0], y + place[1]), size, "", color)


_Corner = tuple[float, float]


def fractions(item: Parameter, block: Block) -> list[tuple[_Corner, _Corner]]:
    """Return the rectangles of a block in a matrix of width 1 and height 1.

    Each rectangle is a pair of corners (x, y). The matrices of experts are side by side. A vector
    is a row.
    """
    if any(start == stop for start, stop in block) or not block:
        return []
    if len(item.shape) == 1:
        block, shape = ((0, 1), *block), (1, *item.shape)
    else:
        shape = item.shape
    low, high = (each / shape[0] for each in block[0])
    if len(shape) == 2:
        return [((block[1][0] / shape[1], low), (block[1][1] / shape[1], high))]
    _, experts, columns = shape
    left, right = (each / columns for each in block[2])
    if right - left == 1:  # adjacent matrices
        return [((block[1][0] / experts, low), (block[1][1] / experts, high))]
    return [
        (((expert + left) / experts, low), ((expert + right) / experts, high))
        for expert in range(*block[1])
    ]


def _borders(
    blocks: RankBlocks, number: int, corner: tuple[float, float], height: float
) -> Iterator[str]:
    """Yield the dashed lines on the right of and below the boxes of a row.

    A line between two hosts is wider than a line between two devices.
    """
    (left, top), ranks = corner, blocks.rows[number].ranks
    below = blocks.rows[number + 1].ranks if number + 1 < len(blocks.rows) else ()
    axis = blocks.rows[number].axis
    for column, rank in enumerate(ranks):
        x = left + WIDTH * (column + 1)
        if column + 1 < len(ranks):
            style = "host" if differ(blocks, rank, ranks[column + 1]) else "device"
            yield line((x, top + 3), (x, top + height - 3), style)
        if not axis and column < len(below):
            style = "host" if differ(blocks, rank, below[column]) else "device"
            y = top + height
            yield line((x - WIDTH + 3, y), (x - 3, y), style)
