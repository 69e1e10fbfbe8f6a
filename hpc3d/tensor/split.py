"""How a product is split: mesh axes on the loops m, n and k, and the published schemes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from hpc3d.plain import Problems
from hpc3d.tensor.layout import Layout

LOOPS = "m", "n", "k"
STORAGE = "replicate", "own", "panels"  # a foreign axis that is not named there shards


@dataclass(frozen=True)
class Split:
    """The mesh axes on each loop of Y[m, n] = X[m, k] W[k, n], outermost first.

    The axes on the letter that a matrix lacks are foreign to it.  A foreign axis shards the
    block's rows, unless it is named in `replicate` (every rank stores the block) or in `own`
    (the rank on the diagonal stores it).  An axis of n in `panels` shards X's columns instead,
    and the product runs panel by panel of k (SUMMA).  The sum of a weight gradient over an axis
    in `defer` is left to the end of the step; over an axis in `scatter` the gradient is sharded
    although the weight is replicated.  Those two are for axes of other rows, see `over`.

    Raises ValueError with a line for everything that the algebra does not have.
    """

    m: str = ""
    n: str = ""
    k: str = ""
    replicate: str = ""
    own: str = ""
    panels: str = ""
    defer: str = ""
    scatter: str = ""

    def __post_init__(self) -> None:
        if problems := [*misplaced(vars(self))]:
            raise Problems(problems)

    @cache  # noqa: B019  there are few splits
    def next(self) -> Split:
        """The split of the layer that follows: its k is this layer's n, so its X is this Y."""
        stay = [axis for axis in self.n.split() if axis in self.panels.split()]
        turn = [axis for axis in self.n.split() if axis not in stay]
        return replace(self, n=" ".join([*self.k.split(), *stay]), k=" ".join(turn))

    @cache  # noqa: B019
    def without_panels(self) -> Split:
        """The split without panels that stores X alike: for lookups and the head."""
        stay = [axis for axis in self.n.split() if axis in self.panels.split()]
        turn = [axis for axis in self.n.split() if axis not in stay]
        return replace(self, n=" ".join(turn), k=" ".join([*self.k.split(), *stay]), panels="")

    @cache  # noqa: B019
    def alike(self) -> Split:
        """The split of a product whose Y lies as its X does, and both as X of this one: for a
        single product between two that store X alike.  As `by_rows`, but X's columns go panel by
        panel."""
        rows = self.by_rows()
        return replace(rows, n=rows.k, k="", panels=rows.k)

    @cache  # noqa: B019
    def by_rows(self) -> Split:
        """The split of a single product whose Y has few columns, such as a router's: X lies as X
        of this one, and each rank has whole rows of Y.

        An axis of n that shards X's rows, or lets one rank own them, has other rows: it is one
        more of m, the outermost, for the axes of `over` to stay the innermost of W.  (In which
        order axes have rows of X is nothing to a product that does not move them.)  Where X is
        replicated all do the same work.
        """
        panels = self.panels.split()
        rows = [axis for axis in self.n.split() if axis not in [*self.replicate.split(), *panels]]
        columns, m = " ".join([*self.k.split(), *panels]), [*rows, *self.m.split()]
        kept = " ".join(axis for axis in self.replicate.split() if axis in m)
        return replace(self, m=" ".join(m), n="", k=columns, panels="", replicate=kept, own="")

    @cache  # noqa: B019
    def over(self, axis: str, zero: int = 0, outermost: bool = False) -> Split:
        """This split on every replica along an axis whose ranks have other rows, such as the data
        axis; it is the innermost on m, or the `outermost`.

        The replicas store the weights (`zero` < 3) or a shard each (ZeRO-3, arXiv:1910.02054);
        they sum the gradients when the step ends (`zero` < 2) or a shard each in every pass.
        """
        return replace(
            self,
            m=(f"{axis} {self.m}" if outermost else f"{self.m} {axis}").strip(),
            replicate=f"{self.replicate} {axis}".strip() if zero < 3 else self.replicate,
            defer=f"{self.defer} {axis}".strip() if zero < 2 else self.defer,
            scatter=f"{self.scatter} {axis}".strip() if zero == 2 else self.scatter,
        )

    @cached_property
    def x(self) -> Layout:
        columns = " ".join([self.k, self.panels]) if self.panels else self.k
        return self._store(self.m, columns, self.n)

    @cached_property
    def w(self) -> Layout:
        return self._store(self.k, self.n, self.m)

    @cached_property
    def w_transposed(self) -> Layout:
        """The layout of a weight stored as [n, k]: the embedding table that is also the head."""
        return self._store(self.n, self.k, self.m)

    @cached_property
    def of_gradient(self) -> Split:
        """The split whose W is stored as this one's dW is."""
        stay = [axis for axis in self.replicate.split() if axis not in self.scatter.split()]
        return replace(self, replicate=" ".join(stay))

    @cached_property
    def y(self) -> Layout:
        return self._store(self.m, self.n, self.k)

    def _store(self, rows, columns, foreign):
        kept = {*self.replicate.split(), *self.own.split(), *columns.split()}
        shards = [axis for axis in foreign.split() if axis not in kept]
        shards.sort(key=self.scatter.split().__contains__)  # within the block that is replicated
        owned = [axis for axis in foreign.split() if axis in self.own.split()]
        return Layout(" ".join([rows, *shards]), columns, owned=" ".join(owned))


def misplaced(letters: Mapping[str, str]) -> Iterator[str]:
    """A line for every axis on no loop or on several, stored in two ways, or in panels that the
    algebra does not have; `letters` are the fields of a `Split`."""
    axes = {key: letters.get(key, "").split() for key in LOOPS + STORAGE}
    loops = [axis for letter in LOOPS for axis in axes[letter]]
    for axis in sorted({axis for axis in loops if loops.count(axis) > 1}):
        yield (
            f"parallel.split: axis {axis} splits more than one loop, or one twice; "
            "name it once in m, n and k"
        )
    stored = [(key, axis) for key in STORAGE for axis in axes[key]]
    for axis in sorted({axis for _, axis in stored}):
        keys = [key for key, each in stored if each == axis]
        if axis not in loops:
            yield f"parallel.split.{keys[0]}: axis {axis} splits no loop; put it on m, n or k, too"
        if len(keys) > 1:
            yield (
                f"parallel.split: axis {axis} is in {' and in '.join(keys)}; blocks are stored in "
                "one way along an axis: name it once"
            )
    panels = axes["panels"]
    if panels and (panels != axes["n"] or len(panels) > 1 or axes["k"]):
        yield (
            f"parallel.split.panels = {' '.join(panels)}: panels want one axis, alone on n, and "
            "none on k; leave panels out, or split m by the other axes"
        )


SCHEMES = {
    "1d": Split(n="x", replicate="x"),
    "1d-sequence": Split(n="x"),
    "2d": Split(m="x", n="y"),
    "2d-summa": Split(m="x", n="y", panels="y"),
    "2.5d": Split(m="z x", n="y", replicate="z"),
    "3d": Split(m="x", n="y", k="z"),
    "3d-broadcast": Split(m="x", n="y", k="z", own="x y z"),
}
