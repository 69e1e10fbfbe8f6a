"""Blocks of one matrix, and the ranks of the cube that store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hpc3d.analyze.picture.layout_text import described, in_ranges, notes_on
from hpc3d.analyze.picture.rank_boxes import fractions
from hpc3d.analyze.picture.svg_elements import box, polygon, text

if TYPE_CHECKING:
    from hpc3d.analyze.picture.rank_blocks import Block, RankBlocks
    from hpc3d.model.parameters import Parameter

_WIDTH = 200  # of the matrix
_CELL, _SHEAR = (24, 15), 4  # size of a rank on a plane of the cube, and its horizontal offset
_MOST = 8  # ranks in a row or a column of a plane
_PLANES = 16
_BESIDE = 245  # distance between the left edges of the matrix and of the cube
_ROOM = 260  # width of the cube


class _Plane(NamedTuple):
    """Ranks of a plane of the cube, as rows, with the coordinates of the rows and columns."""

    name: str
    ranks: list[list[int]]
    rows: list[str]
    columns: list[str]


def drawing(
    blocks: RankBlocks, item: Parameter, corner: tuple[float, float]
) -> tuple[list[str], float]:
    """Return the elements of a matrix with its blocks and its cube of ranks, and the lower end.

    Parameters
    ----------
    blocks
        Layers and blocks of the ranks.
    item
        Matrix, or another parameter.
    corner
        Upper left corner (x, y).
    """
    x, y = corner
    owners = blocks.owners(item)
    heads = "Blocks, and the ranks that store them", "Ranks, in the color of their block"
    found = [text(x, y + 12, described(blocks, item), "bold")]
    found += [text(x, y + 28, heads[0], "soft"), text(x + _BESIDE, y + 28, heads[1], "soft")]
    top = y + 40
    rows = len({block[0] for block in owners}) if len(item.shape) > 1 else 1
    height = min(320, max(100, 15 * rows))
    found += _matrix(item, owners, (x, top), height)
    planes, end = _cube(blocks, item, (x + _BESIDE, top))
    return [*found, *planes], max(top + height + 8, end)


def _matrix(
    item: Parameter, owners: dict[Block, list[int]], corner: tuple[float, float], height: float
) -> Iterator[str]:
    x, y = corner
    yield box(corner, (_WIDTH, height), "edge")
    for block, ranks in owners.items():
        for low, high in fractions(item, block):
            place = x + low[0] * _WIDTH, y + low[1] * height
            size = (high[0] - low[0]) * _WIDTH, (high[1] - low[1]) * height
            yield box(place, size, "cell", _color(low))
            name = in_ranges(ranks)
            if len(name) * 5.5 > size[0]:
                name = f"{ranks[0]} ..."
            if len(name) * 5.5 < size[0] and size[1] > 10:
                middle = place[0] + size[0] / 2, place[1] + size[1] / 2 + 3.5
                yield text(*middle, name, "small middle dark")


def _color(low: Sequence[float]) -> str:
    """Return the color of a block: its column determines the hue, and its row the lightness."""
    return f"hsl({200 + 300 * low[0]:.0f},60%,{84 - 36 * low[1]:.0f}%)"


def _cube(
    blocks: RankBlocks, item: Parameter, corner: tuple[float, float]
) -> tuple[list[str], float]:
    """Return the elements of the planes of the cube, and their lower end."""
    spanned = [axis for axis in blocks.axes if axis in {*"xyz", *blocks.spanned(item)}]
    planes = _planes(blocks, spanned, blocks.home(item))
    rows, columns = len(planes[0].ranks), len(planes[0].ranks[0])
    width, height = _CELL[0] * columns + _SHEAR * rows + 28, _CELL[1] * rows + 30
    beside = max(1, int(_ROOM // width))
    found = []
    for number, plane in enumerate(planes):
        place = corner[0] + number % beside * width, corner[1] + number // beside * height
        found += _drawn(blocks, item, plane, place)
    y = corner[1] + -(-len(planes) // beside) * height
    shown = sum(len(row) for plane in planes for row in plane.ranks)
    notes = [*notes_on(blocks, item)]
    if shown < prod(blocks.grid.sizes[axis] for axis in spanned):
        notes.append("only the first ranks of each axis are drawn")
    for note in notes:
        y += 13
        found.append(text(corner[0], y - 8, note, "soft"))
    return found, y


def _planes(blocks: RankBlocks, axes: Sequence[str], home: Mapping[str, int]) -> list[_Plane]:
    """Return the planes of the cube that `axes` span, through the rank with coordinates `home`.

    The last axis is horizontal on a plane, and the previous one is vertical. There is one plane
    for each choice of the other coordinates. A single axis is drawn in rows of eight ranks.
    """
    sizes = blocks.grid.sizes
    if len(axes) == 1 and sizes[axes[0]] > _MOST:
        ranks = blocks.grid.ranks_along(axes[0], home)[: _MOST * _PLANES]
        starts = range(0, len(ranks), _MOST)
        rows = [[*ranks[start : start + _MOST]] for start in starts]
        return [_Plane("", rows, [f"{axes[0]}{start}" for start in starts], [])]
    *outer, down, right = ["", "", *axes][-max(2, len(axes)) :]
    planes = []
    for coords in islice(product(*(range(sizes[axis]) for axis in outer)), _PLANES):
        fixed = dict(zip(outer, coords))
        rows = [
            [blocks.grid.rank({**home, **fixed, **one, **two}) for two in _coords(blocks, right)]
            for one in _coords(blocks, down)
        ]
        planes.append(_Plane(_named(fixed), rows, _names(blocks, down), _names(blocks, right)))
    return planes


def _coords(blocks: RankBlocks, axis: str) -> list[dict[str, int]]:
    """Return the first coordinates along an axis, or one empty dict for the axis ""."""
    size = blocks.grid.sizes[axis] if axis else 1
    return [{axis: place} if axis else {} for place in range(min(size, _MOST))]


def _names(blocks: RankBlocks, axis: str) -> list[str]:
    return [*map(_named, _coords(blocks, axis))]


def _named(coords: Mapping[str, int]) -> str:
    return " ".join(f"{axis}{place}" for axis, place in coords.items())


def _drawn(
    blocks: RankBlocks, item: Parameter, plane: _Plane, corner: tuple[float, float]
) -> Iterator[str]:
    """Yield the elements of a plane. A rank that stores no part of the matrix has no color."""
    (width, height), lean = _CELL, _SHEAR
    left, top = corner[0] + 22 + lean * len(plane.ranks), corner[1] + 20
    yield text(corner[0], corner[1] + 8, plane.name, "small bold")
    for column, name in enumerate(plane.columns):
        yield text(left + width * (column + 0.5), top - 4, name, "small middle soft")
    for row, ranks in enumerate(plane.ranks):
        x, y = left - lean * row, top + height * row
        yield text(x - lean - 3, y + height - 4, plane.rows[row], "small end soft")
        for column, rank in enumerate(ranks):
            start = x + width * column
            corners = (start, y), (start + width, y), (start + width - lean, y + height)
            parts = fractions(item, blocks.block(rank, item) or ())
            color = _color(parts[0][0]) if parts else "none"
            yield polygon((*corners, (start - lean, y + height)), "cell", color)
            style = "small middle" + " dark" * bool(parts)
            yield text(start + (width - lean) / 2, y + height - 4, str(rank), style)
