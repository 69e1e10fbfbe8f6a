"""A figure that a notebook shows and a script saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.extras import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120  # of what a notebook shows


class Drawing:
    """A figure, drawn by `make()` when it is first looked at; a notebook shows it as PNG."""

    def __init__(self, make: Callable[[], Figure]) -> None:
        need("a figure", "matplotlib")
        self._make = make

    @cached_property
    def figure(self) -> Figure:
        """The figure of matplotlib, for changes of one's own."""
        return self._make()

    def save(self, path: Path | str) -> Path:
        """Write the figure as PNG, SVG or PDF, by the ending of `path`; its path.

        ValueError for another ending, OSError where nothing can be written.
        """
        from hpc3d.trace.segment import naming

        path = Path(path)
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"{path}: figures are written as .png, .svg or .pdf")
        with naming(path):
            self.figure.savefig(path, dpi=200)
        return path

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        self.figure.savefig(image, format="png", dpi=_DPI)
        return image.getvalue()
