"""SVG picture of a layout. The text in it repeats the text form, so colors are not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from hpc3d.analyze.picture import matrix_blocks, rank_boxes
from hpc3d.analyze.picture.layout_text import USES, lines, title
from hpc3d.analyze.picture.svg_elements import box, line, text

if TYPE_CHECKING:
    from hpc3d.analyze.picture.rank_blocks import RankBlocks

_LEFT = 12
_WIDTH = 520
_COLUMNS = 0, 34, 76, 176, 276, 376  # left edges of the table of axes

_LEGEND = (
    "A box is a rank, and a rectangle is the largest matrix of a layer.",
    "The rank stores the filled part. Ranks with equal filled parts store replicas.",
)
# A program that does not know light-dark() uses the first declaration of each pair. Inside an HTML
# page, the picture has the color scheme of the page.
_STYLE = """
.layout:root { color-scheme: light dark }
.layout { font: 11px system-ui, "DejaVu Sans", Arial, sans-serif }
.layout text { fill: #1c2330; fill: light-dark(#1c2330, #e6e9ef) }
.layout .soft { fill: #5b6472; fill: light-dark(#5b6472, #a5aebd) }
.layout .dark { fill: #111 }
.layout .title { font-size: 13px; font-weight: bold }
.layout .bold { font-weight: bold }
.layout .small { font-size: 9.5px }
.layout .tiny { font-size: 8px }
.layout .end { text-anchor: end }
.layout .middle { text-anchor: middle }
.layout .ground { fill: #fff; fill: light-dark(#fff, #14181f) }
.layout .edge { fill: none; stroke: #9aa3b0; stroke-width: 0.6 }
.layout .all { fill-opacity: 0.22 }
.layout .cell { stroke: #1c2330; stroke: light-dark(#1c2330, #e6e9ef); stroke-width: 0.5 }
.layout .device { stroke: #9aa3b0; stroke-dasharray: 2 3 }
.layout .host { stroke: #1c2330; stroke: light-dark(#1c2330, #e6e9ef); stroke-width: 2.5;
  stroke-dasharray: 7 4 }
"""


def page(blocks: RankBlocks, colors: Sequence[str], matrix: str | None = None) -> str:
    """Return the picture as an SVG document, which can also be part of an HTML page.

    Parameters
    ----------
    blocks
        Layers and blocks of the ranks.
    colors
        Colors of layers, which repeat.
    matrix
        Name of a parameter whose blocks are drawn (default: the largest matrix of the first
        block).

    Raises
    ------
    ValueError
        If the model has no parameter of this name.
    """
    item = blocks.matrix(matrix)
    name, _, layout = title(blocks).partition(": ")
    found = [text(_LEFT, 22, name, "title"), text(_LEFT, 39, layout), *_uses(blocks, 61)]
    y = 61 + 15 * (len(blocks.axes) + 1) if blocks.axes else 50
    boxes, y = rank_boxes.drawing(blocks, (_LEFT, y), colors)
    found += [*boxes, *_legend(blocks, y + 18)]
    drawn, y = matrix_blocks.drawing(blocks, item, (_LEFT, y + 66))
    found += drawn
    size = f'viewBox="0 0 {_WIDTH} {y:.0f}" width="{_WIDTH}" height="{y:.0f}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="layout" {size} role="img">',
        f"<title>{escape(title(blocks))}</title>",
        f"<desc>{escape(_summary(blocks, matrix))}</desc>",
        f"<style>{_STYLE}</style>",
        box((0, 0), (_WIDTH, y), "ground"),
    ]
    return "\n".join([*head, *found, "</svg>\n"])


def _summary(blocks: RankBlocks, matrix: str | None) -> str:
    """Return the text alternative: the text form with one space between columns."""
    return "\n".join(" ".join(each.split()) for each in lines(blocks, matrix))


def _uses(blocks: RankBlocks, y: float) -> Iterator[str]:
    """Yield the table that states what is split or replicated along each axis."""
    rows = [USES, *blocks.uses()]
    for number, cells in enumerate(rows if blocks.axes else ()):
        for left, cell in zip(_COLUMNS, cells):
            yield text(_LEFT + left, y + 15 * number, str(cell), "" if number else "soft")


def _legend(blocks: RankBlocks, y: float) -> Iterator[str]:
    for number, words in enumerate(_LEGEND):
        yield text(_LEFT, y + 14 * number, words, "soft")
    kinds = {"device": "between devices"}
    if len({*blocks.hosts}) > 1:
        kinds["host"] = "between hosts"
    for number, (style, words) in enumerate(kinds.items()):
        x = _LEFT + 150 * number
        yield line((x, y + 24), (x + 30, y + 24), style)
        yield text(x + 36, y + 28, words, "soft")
