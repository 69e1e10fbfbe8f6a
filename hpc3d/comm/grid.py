"""Arithmetic of ranks and coordinates on named axes, without communication."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

AXES = ("p", "d", "c", "e", "x", "y", "z")  # of a mesh


@dataclass(frozen=True, eq=False)
class Grid:
    """Axes with sizes, outermost first: the last varies fastest, as in MPI Cartesian communicators
    and C-ordered arrays.

        Grid({"p": 2, "x": 3})     x=0  x=1  x=2
                             p=0    0    1    2
                             p=1    3    4    5

    >>> grid = Grid({"p": 2, "x": 3})
    >>> grid.size, grid.stride("p"), grid.stride("x")
    (6, 3, 1)
    >>> grid.coords(4)
    {'p': 1, 'x': 1}
    >>> grid.rank({"p": 1, "x": 1})
    4
    >>> list(grid.ranks_along("x", {"p": 1}))
    [3, 4, 5]

    Omitted coordinates are 0.
    """

    sizes: Mapping[str, int]

    def __post_init__(self):
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @cached_property
    def _strides(self):
        stride, found = self.size, {}
        for axis, size in self.sizes.items():
            stride //= size
            found[axis] = stride
        return found

    def stride(self, axis: str) -> int:
        """Return the distance between the ranks of neighbors along an axis."""
        return self._strides[axis]

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at `coords`."""
        rank = 0
        for axis, coord in coords.items():
            rank += coord * self._strides[axis]
        return rank

    def coord(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank on an axis."""
        return rank // self._strides[axis] % self.sizes[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, axis -> coordinate."""
        return {axis: self.coord(rank, axis) for axis in self.sizes}

    def ranks_along(self, axis: str, coords: Mapping[str, int]) -> range:
        """Return the ranks that differ from the one at `coords` along `axis` only, including
        itself."""
        stride = self._strides[axis]
        first = self.rank(coords) - coords.get(axis, 0) * stride
        return range(first, first + self.sizes[axis] * stride, stride)

    def ranks_over(self, axes: Iterable[str], coords: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks that differ from the one at `coords` along `axes` only.

        The last axis varies fastest; an axis that the grid lacks has one rank.

        >>> Grid({"d": 2, "x": 2, "c": 2}).ranks_over(("c", "d"), {"x": 1})
        (2, 6, 3, 7)
        """
        cut = [axis for axis in axes if axis in self.sizes]
        ranks = [self.rank({**coords, **dict.fromkeys(cut, 0)})]
        for axis in cut:
            stride = self.stride(axis)
            steps = range(0, self.sizes[axis] * stride, stride)
            ranks = [rank + step for rank in ranks for step in steps]
        return tuple(ranks)
