"""Model sizes and meshes of a scaling study.

In weak scaling, the work per rank is constant: the hidden size and the batch size grow with the
cube root of the number of ranks, and the work is proportional to hidden^2 x batch. In strong
scaling, they are constant. All sizes are rounded to multiples of the number of ranks, and the
number of heads equals the number of ranks, so that every scheme can shard the model equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

CUBOID = "3d cuboid"
_INEXACT = 4 / 3  # maximum ratio of a rounded size to the intended size
SCHEMES = ("1d", "2d-summa", "2.5d", "3d", CUBOID)


class Point(NamedTuple):
    """Model and mesh of one row of the table.

    `scheme` is one of SCHEMES, and `mesh` contains the sizes of x, y and z. `mesh` is `None` if
    the mesh is yet to be chosen (CUBOID).
    """

    scheme: str
    ranks: int
    mesh: tuple[int, int, int] | None
    hidden: int
    batch: int
    heads: int
    vocabulary: int
    layers: int

    def configured(self, config: Config) -> Config:
        """Return a copy of `config` with the model and mesh of this point."""
        sizes = {key: getattr(self, key) for key in ("hidden", "heads", "vocabulary", "layers")}
        scheme = "3d" if self.scheme == CUBOID else self.scheme
        mesh = dict(zip("xyz", self.mesh or (None, None, None), strict=True))
        return replace(
            config,
            mesh=replace(config.mesh, p=1, d=1, c=1, e=1, **mesh),
            parallel=replace(config.parallel, scheme=scheme),
            model=replace(config.model, **sizes),
            train=replace(config.train, batch=self.batch),
        )

    def options(self) -> list[str]:
        """Return the options of hpc3d.train for this point."""
        scheme = "3d" if self.scheme == CUBOID else self.scheme
        x, y, z = self.mesh
        given: dict[str, Any] = {
            "parallel.scheme": scheme,
            "mesh.x": x,
            "mesh.y": y,
            "mesh.z": z,
            "model.hidden": self.hidden,
            "model.heads": self.heads,
            "model.vocabulary": self.vocabulary,
            "model.layers": self.layers,
            "train.batch": self.batch,
        }
        return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def point_of(config: Config) -> Point:
    """Return the point that corresponds to a resolved configuration."""
    mesh, model = config.mesh, config.model
    grid = mesh.x, mesh.y, mesh.z
    scheme, ranks = config.parallel.scheme, mesh.grid().size
    if scheme == "3d" and grid != mesh_of("3d", ranks):
        scheme = CUBOID
    return Point(
        scheme,
        ranks,
        grid,
        model.hidden,
        config.train.batch,
        model.heads,
        model.vocabulary,
        model.layers,
    )


def points(
    config: Config, ranks: Sequence[int], schemes: Sequence[str], weak: bool, shared: bool = True
) -> tuple[list[Point], list[str]]:
    """Return the points of a study, and a message for each impossible scheme and rank count.

    `config` contains the sizes for the largest number of ranks. In weak scaling, smaller numbers
    of ranks have smaller models. If `shared` is True, all schemes use the same sizes, rounded to
    multiples of the number of ranks. Otherwise, a mesh with three axes only requires multiples of
    x max(y, z).
    """
    found, missing = [], []
    for scheme in schemes:
        for count in ranks:
            grid = None if scheme == CUBOID else mesh_of(scheme, count)
            if isinstance(grid, str):
                missing.append(grid)
            else:
                side = (count / max(ranks)) ** (1 / 3) if weak else 1
                cube = not shared and grid and 1 not in grid
                multiple = grid[0] * max(grid[1:]) if cube else count
                sizes = _sizes(config, multiple, side)
                if sizes is None:
                    missing.append(f"{scheme}: {count} ranks need sizes divisible by {multiple}")
                else:
                    found.append(Point(scheme, count, grid, **sizes))
    return found, missing


def _sizes(config, multiple, side):
    """Return the sizes of a point as a dict.

    `side` is the ratio of the hidden size and the batch size to those in `config`. The result is
    `None` if rounding to multiples would change them by more than a third.
    """
    model, train = config.model, config.train
    wanted = model.hidden * side, train.batch * side
    hidden, batch = (_rounded(size, multiple) for size in wanted)
    if max(hidden / wanted[0], batch / wanted[1]) > _INEXACT:
        return None
    vocabulary = multiple * ceil(model.vocabulary / multiple)  # every token has an ID
    return {
        "hidden": hidden,
        "batch": batch,
        "heads": multiple,
        "vocabulary": vocabulary,
        "layers": model.layers,
    }


def _rounded(size: float, multiple: int) -> int:
    return multiple * max(1, round(size / multiple))


def mesh_of(scheme: str, ranks: int) -> tuple[int, int, int] | str:
    """Return the mesh of a scheme, or a sentence that explains why the scheme has no such mesh."""
    if scheme == "1d":
        return ranks, 1, 1
    if scheme == "2d-summa":
        side = isqrt(ranks)
        grid = (side, side, 1) if side * side == ranks else None
        what = "square"
    elif scheme == "2.5d":
        sides = range(1, isqrt(ranks) + 1)
        fits = [n for n in sides if ranks % (n * n) == 0 and 1 < ranks // (n * n) <= n]
        grid = (fits[0], fits[0], ranks // fits[0] ** 2) if fits else None
        what = "q x q x d grid with 1 < d <= q"
    else:
        side = round(ranks ** (1 / 3))
        grid = (side,) * 3 if side**3 == ranks else None
        what = "cube"
    if grid is None and ranks == 1:
        return 1, 1, 1
    return grid or f"{scheme}: {ranks} ranks do not form a {what}"
