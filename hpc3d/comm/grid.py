"""Convert between ranks and coordinates on named axes, without communication."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from types import MappingProxyType

AXES = ("p", "d", "c", "e", "x", "y", "z")  # axes of a mesh


@dataclass(frozen=True, eq=False)
class Grid:
    """Ranks on a grid with named axes.

    The last axis varies fastest, as in MPI Cartesian communicators and C-ordered arrays.  The
    ranks of Grid({"p": 2, "x": 3}) are::

              x=0  x=1  x=2
        p=0    0    1    2
        p=1    3    4    5

    Parameters
    ----------
    sizes
        Size of each axis, outermost first.

    Examples
    --------
    >>> grid = Grid({"p": 2, "x": 3})
    >>> grid.size, grid.stride("p"), grid.stride("x")
    (6, 3, 1)
    >>> grid.coords(4)
    {'p': 1, 'x': 1}
    >>> grid.rank({"p": 1, "x": 1})
    4
    >>> list(grid.ranks_along("x", {"p": 1}))
    [3, 4, 5]
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
        """Return the rank stride between neighbors along an axis.

        Parameters
        ----------
        axis
            Axis along which the ranks are neighbors.

        Returns
        -------
        int
            Difference between the ranks of two neighbors.
        """
        return self._strides[axis]

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates.

        Parameters
        ----------
        coords
            Coordinate on each axis; an omitted coordinate is 0.

        Returns
        -------
        int
            The rank.
        """
        rank = 0
        for axis, coord in coords.items():
            rank += coord * self._strides[axis]
        return rank

    def coord(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank on one axis.

        Parameters
        ----------
        rank
            A rank.
        axis
            Axis of the coordinate.

        Returns
        -------
        int
            The coordinate.
        """
        return rank // self._strides[axis] % self.sizes[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """Return all coordinates of a rank.

        Parameters
        ----------
        rank
            A rank.

        Returns
        -------
        dict
            Coordinate on each axis.
        """
        return {axis: self.coord(rank, axis) for axis in self.sizes}

    def ranks_along(self, axis: str, coords: Mapping[str, int]) -> range:
        """Return the ranks along one axis of the grid.

        Parameters
        ----------
        axis
            Axis along which the coordinate varies.
        coords
            Coordinates of any of these ranks; an omitted coordinate is 0.

        Returns
        -------
        range
            The ranks, in the order of their coordinate on `axis`.
        """
        stride = self._strides[axis]
        first = self.rank(coords) - coords.get(axis, 0) * stride
        return range(first, first + self.sizes[axis] * stride, stride)

    def ranks_over(self, axes: Iterable[str], coords: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ranks of the subgrid spanned by several axes.

        Parameters
        ----------
        axes
            Axes of the subgrid; an axis that is not in the grid has size 1.
        coords
            Coordinates of any rank of the subgrid; an omitted coordinate is 0.

        Returns
        -------
        tuple
            The ranks; the last of `axes` varies fastest.

        Examples
        --------
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


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})
