"""Draw docs/cube.svg, the 3-D matrix product on a 2 x 2 x 2 cube of ranks.

python docs/figures/cube.py
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PARTS = 2
DEPTH = np.array([0.55, 0.42])  # the k axis on paper; n points right and m points down
FACES = {
    "X": ("#0072b2", "[m, k]", "n, axis y", "all-gather X", "reduce-scatter dX"),
    "W": ("#d55e00", "[k, n]", "m, axis x", "all-gather W", "reduce-scatter dW"),
    "Y": ("#009e73", "[m, n]", "k, axis z", "reduce-scatter Y", "all-gather dY"),
}
CORNERS = {  # (m, n, k) of the corners of a face of the unit cube
    "X": [(0, 1, 0), (0, 1, 1), (1, 1, 1), (1, 1, 0)],
    "W": [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)],
    "Y": [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)],
}
RANK = np.array([0, PARTS - 1, 0])  # the origin of the small cube that is highlighted


def on_paper(m: float, n: float, k: float) -> np.ndarray:
    return np.array([n, -m]) + k * DEPTH


def draw_cube(axes: Axes) -> None:
    for name, corners in CORNERS.items():
        color = FACES[name][0]
        face = np.array([on_paper(*(PARTS * np.array(corner))) for corner in corners])
        axes.fill(*face.T, color=color, alpha=0.30, linewidth=0)
        block = [on_paper(*(RANK + corner)) for corner in corners]
        axes.fill(*np.array(block).T, color=color, alpha=0.85, linewidth=0)
        for part in range(PARTS + 1):
            share = part / PARTS
            for a, b in ((0, 1), (1, 2)):
                start = face[a] + share * (face[b] - face[a])
                other = face[(a - 1) % 4] + share * (face[(b + 1) % 4] - face[(a - 1) % 4])
                axes.plot(*np.array([start, other]).T, color="white", linewidth=1.5)
    style = {"ha": "center", "va": "center", "fontsize": 15, "fontweight": "bold"}
    axes.text(*on_paper(1.5, 0.5, 0), "Y", **style)
    axes.text(*on_paper(0, 0.5, 0.5), "W", **style)
    axes.text(*on_paper(1.5, PARTS, 0.5), "X", **style)
    axes.text(*on_paper(2.13, 1, 0), "n: output features, split by axis y", ha="center", va="top")
    axes.text(*on_paper(1, -0.1, 0), "m: tokens,\nsplit by axis x", ha="right", va="center")
    axes.text(
        *on_paper(-0.05, -0.1, 1), "k: input features,\nsplit by axis z", ha="right", va="center"
    )


def draw_legend(axes: Axes) -> None:
    columns = 4.0, 5.35, 6.8, 8.8
    heads = "matrix", "lacks", "forward", "backward"
    for x, head in zip(columns, heads, strict=True):
        axes.text(x, 0.35, head, fontweight="bold", va="center")
    for row, (name, (color, loops, *cells)) in enumerate(FACES.items(), 1):
        y = 0.35 - 0.5 * row
        axes.text(columns[0], y, f"{name}{loops}", color=color, fontweight="bold", va="center")
        for x, cell in zip(columns[1:], cells, strict=True):
            axes.text(x, y, cell, va="center")
    axes.text(
        columns[0],
        -1.85,
        "One rank (dark) multiplies one small cube. The ranks along the axis\n"
        "that a matrix lacks need the same block of it, which is sharded over them.",
        va="center",
    )


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "hpc3d"  # identical output on every run
    figure = Figure(figsize=(10.5, 3.4))
    axes = figure.subplots()
    draw_cube(axes)
    draw_legend(axes)
    axes.set(xlim=(-1.55, 10.4), ylim=(-2.45, 1.0), aspect="equal")
    axes.axis("off")
    target = Path(__file__).parents[1] / "cube.svg"
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    main()
