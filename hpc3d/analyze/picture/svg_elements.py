"""Elements of an SVG picture, as text. Sizes are in user units, which are pixels at full size."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text(x: float, y: float, words: str, style: str = "", color: str = "") -> str:
    """Return a line of text that starts at (x, y); `style` lists classes of the style sheet."""
    return f'<text x="{x:g}" y="{y:g}"{_look(style, color)}>{escape(words)}</text>'


def box(corner: Sequence[float], size: Sequence[float], style: str = "", color: str = "") -> str:
    """Return a rectangle with the given upper left corner (x, y) and size (width, height)."""
    (x, y), (width, height) = corner, size
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f"<rect {place}{_look(style, color)}/>"


def line(start: Sequence[float], end: Sequence[float], style: str) -> str:
    """Return a straight line between two points (x, y)."""
    (x, y), (right, bottom) = start, end
    place = f'x1="{x:g}" y1="{y:g}" x2="{right:g}" y2="{bottom:g}"'
    return f"<line {place}{_look(style)}/>"


def polygon(corners: Sequence[Sequence[float]], style: str = "", color: str = "") -> str:
    """Return a polygon with the given corners (x, y)."""
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return f'<polygon points="{points}"{_look(style, color)}/>'


def _look(style: str, color: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return named + (f' fill="{color}"' if color else "")
