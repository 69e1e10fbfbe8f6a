"""Splits of matrix products (mesh axes that shard m, n and k), including published schemes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from hpc3d.console.sanitize import Problems
from hpc3d.tensor.layout import Layout

LOOPS = "m", "n", "k"
STORAGE = "replicate", "own", "panels"  # fields of `Split` that override its default storage


@dataclass(frozen=True)
class Split:
    """Mesh axes that shard each loop dimension of Y[m, n] = X[m, k] W[k, n].

    Each matrix lacks one of the three dimensions; the mesh axes that shard this dimension are
    foreign to the matrix.  By default, foreign axes also shard the rows of the matrix;
    `replicate`, `own` and `panels` override this.  `defer`, `scatter` and `uneven` are for axes
    whose ranks process different rows of X, such as the data axis; `over` adds such axes.

    Parameters
    ----------
    m, n, k
        Axes that shard the dimension, separated by spaces, outermost first.
    replicate
        Foreign axes along which every rank stores the block.
    own
        Foreign axes along which only the rank on the diagonal stores the block.
    panels
        An axis of n that shards the columns of X instead.  The product is computed one panel of k
        at a time (SUMMA).
    defer
        Axes over which weight gradients are reduced at the end of the step.
    scatter
        Axes over which the weight gradient is sharded although the weight is replicated.
    uneven
        Axes that shard the rows of the weight, and whose size need not divide the number of rows.
        The shards are padded to equal sizes, like those along the axes in `scatter`.

    Raises
    ------
    ValueError
        If a combination of axes is not supported.  The message has one line per problem.
    """

    m: str = ""
    n: str = ""
    k: str = ""
    replicate: str = ""
    own: str = ""
    panels: str = ""
    defer: str = ""
    scatter: str = ""
    uneven: str = ""

    def __post_init__(self) -> None:
        if problems := [*misplaced(vars(self))]:
            raise Problems(problems)

    @cache  # noqa: B019
    def next(self) -> Split:
        """Return the split of the next layer.

        Returns
        -------
        Split
            Split with n and k exchanged, unless n has panels.  Its X has the same layout as the Y
            of this split.
        """
        return self if self.panels else replace(self, n=self.k, k=self.n)

    @cache  # noqa: B019
    def without_panels(self) -> Split:
        """Return the equivalent split without panels, which stores X in the same layout.

        Embedding lookups and the head use it.
        """
        return replace(self, n="", k=self.panels, panels="") if self.panels else self

    @cache  # noqa: B019
    def alike(self) -> Split:
        """Return a split in which X and Y both have the layout of this split's X.

        Use it for a matrix product whose input and output are both stored in this layout.  The
        result is the split that `by_rows` returns, with the axes of k moved to n.  The product is
        therefore computed one panel of k at a time.
        """
        rows = self.by_rows()
        return replace(rows, n=rows.k, k="", panels=rows.k)

    @cache  # noqa: B019
    def by_rows(self) -> Split:
        """Return a split for products whose Y has few columns, such as the logits of a router.

        X keeps its layout, and each rank computes complete rows of Y. Axes of n that shard the
        rows of X, and axes of n with `own` storage, become the outermost axes of m, so that axes
        added by `over` remain innermost in the layout of W. (The order of the axes that shard the
        rows of X is irrelevant, because X is not communicated.) Ranks along an axis that
        replicates X compute the same rows redundantly.
        """
        whole = self.without_panels()
        rows = [axis for axis in whole.n.split() if axis not in self.replicate.split()]
        m = [*rows, *self.m.split()]
        kept = " ".join(axis for axis in self.replicate.split() if axis in m)
        return replace(whole, m=" ".join(m), n="", replicate=kept, own="")

    @cache  # noqa: B019
    def over(self, axis: str, zero: int = 0, outermost: bool = False) -> Split:
        """Return this split with an additional axis that shards m, such as the data axis.

        Parameters
        ----------
        axis
            Axis whose ranks process different rows of X and hold replicas of the weights.
        zero
            ZeRO stage (arXiv:1910.02054).  In stages 0 and 1, gradients are all-reduced at the end
            of the step; in stages 2 and 3, they are reduce-scattered in every backward pass.  In
            stage 3, each replica stores a shard of the weights.
        outermost
            True to add the outermost axis of m, False to add the innermost one.

        Returns
        -------
        Split
            The new split.
        """
        return replace(
            self,
            m=(f"{axis} {self.m}" if outermost else f"{self.m} {axis}").strip(),
            replicate=f"{self.replicate} {axis}".strip() if zero < 3 else self.replicate,
            defer=f"{self.defer} {axis}".strip() if zero < 2 else self.defer,
            scatter=f"{self.scatter} {axis}".strip() if zero == 2 else self.scatter,
            uneven=f"{self.uneven} {axis}".strip() if zero == 3 else self.uneven,
        )

    @cached_property
    def x(self) -> Layout:
        """Layout of X[m, k]."""
        return self._store(self.m, f"{self.k} {self.panels}", self.n)

    @cached_property
    def w(self) -> Layout:
        """Layout of W[k, n]."""
        return self._store(self.k, self.n, self.m)

    @cached_property
    def w_transposed(self) -> Layout:
        """Layout of a weight stored as [n, k], such as an embedding table tied to the head."""
        return self._store(self.n, self.k, self.m)

    @cached_property
    def of_gradient(self) -> Split:
        """This split, but with W in the layout of dW, which ZeRO-2 shards over the data axis."""
        stay = [axis for axis in self.replicate.split() if axis not in self.scatter.split()]
        return replace(self, replicate=" ".join(stay))

    @cached_property
    def y(self) -> Layout:
        """Layout of Y[m, n]."""
        return self._store(self.m, self.n, self.k)

    def _store(self, rows, columns, foreign):
        kept = {*self.replicate.split(), *self.own.split(), *columns.split()}
        shards = [axis for axis in foreign.split() if axis not in kept]
        shards.sort(key=self.scatter.split().__contains__)  # scatter axes are innermost
        owned = [axis for axis in foreign.split() if axis in self.own.split()]
        padded = " ".join(self._padded(shards))
        return Layout(" ".join([rows, *shards]), columns, owned=" ".join(owned), padded=padded)

    def _padded(self, shards: Sequence[str]) -> Sequence[str]:
        """Return the foreign axes whose size need not divide the number of rows.

        SUMMA broadcasts panels of the outermost shards, which therefore have no padding.
        """
        inner = shards[bool(self.panels) :]
        if {*inner} & {*self.uneven.split()}:
            return inner
        return [axis for axis in inner if axis in self.scatter.split()]


def misplaced(letters: Mapping[str, str]) -> Iterator[str]:
    """Yield an error message for each unsupported use of a mesh axis in a split.

    `letters` maps each field name of a `Split` to its value. An axis must be in exactly one of
    m, n and k, and in at most one storage field. If `panels` is not empty, it must be the
    only axis of n, and k must be empty.
    """
    axes = {key: letters.get(key, "").split() for key in LOOPS + STORAGE}
    loops = [axis for letter in LOOPS for axis in axes[letter]]
    for axis in sorted({axis for axis in loops if loops.count(axis) > 1}):
        yield (
            f"parallel.split: axis {axis} occurs more than once in m, n and k; remove all but one"
        )
    stored = [(key, axis) for key in STORAGE for axis in axes[key]]
    for axis in sorted({axis for _, axis in stored}):
        keys = [key for key, each in stored if each == axis]
        if axis not in loops:
            yield f"parallel.split.{keys[0]}: axis {axis} is not in m, n or k; add it to one"
        if len(keys) > 1:
            yield (
                f"parallel.split: axis {axis} is in {' and in '.join(keys)}; keep only one of them"
            )
    panels = axes["panels"]
    if panels and (panels != axes["n"] or len(panels) > 1 or axes["k"]):
        yield (
            f"parallel.split.panels = {' '.join(panels)}: panels must be exactly one axis, which "
            "is the only axis of n, and k must have none; omit panels, or move the other axes to m"
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
PUBLISHED = tuple(SCHEMES)  # names in input files; a scheme that is added later needs `split`
