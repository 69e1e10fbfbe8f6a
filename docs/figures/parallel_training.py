"""Draw the figures of the pages about parallel training: python docs/figures/parallel_training.py

Every figure is an SVG file next to this module.  Lightness carries the meaning, so that the
figures can be read in grayscale.
"""

import re
from io import StringIO
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from hpc3d.comm.grid import Grid
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, bubble, timeline

FOLDER = Path(__file__).parent
INK, EMPTY = "#222222", "#ffffff"
SHADES = "#f2d9b3", "#a9c8e0", "#6c93b8", "#33567d"  # lightest first
RANKS = 4
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpc3d",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
}


def canvas(width, height, x, y):
    """Figure of width x height inches without axes, with data coordinates 0..x and y..0."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, x), ylim=(y, 0))
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, color, text="", **text_style):
    dark = color == SHADES[3]
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.8))
    style = {"ha": "center", "va": "center", "color": EMPTY if dark else INK} | text_style
    axes.text(x + width / 2, y + height / 2, text, **style)


def arrow(axes, start, end, **style):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, **style))


def zero_stages():
    """Memory of four replicas under each ZeRO stage, in float32 with AdamW."""
    figure, axes = canvas(7.5, 4.2, 106, 57)
    kinds = [("parameters", 4, 3), ("gradients", 4, 2), ("optimizer state", 8, 1)]
    for rank in range(RANKS):
        axes.text(28 + 16 * rank, 2, f"replica {rank}", ha="center")
    axes.text(96, 2, "bytes / parameter", ha="center")
    for stage in range(4):
        top = 5 + 11 * stage
        axes.text(1, top + 4, f"ZeRO {stage}", va="center", weight="bold")
        for rank in range(RANKS):
            y = top
            for number, (_, size, from_stage) in enumerate(kinds):
                x, height = 21 + 16 * rank, 0.5 * size
                box(axes, x, y, 14, height, EMPTY)
                if stage < from_stage:
                    box(axes, x, y, 14, height, SHADES[number + 1])
                else:
                    box(axes, x + 3.5 * rank, y, 3.5, height, SHADES[number + 1])
                y += height
        stored = sum(size / (RANKS if stage >= first else 1) for _, size, first in kinds)
        axes.text(96, top + 4, f"{stored:g}", ha="center", va="center")
    for number, (kind, size, _) in enumerate(kinds):
        x = (1, 34, 66)[number]
        box(axes, x, 52, 3.5, 3, SHADES[number + 1])
        axes.text(x + 5, 53.5, f"{kind}, {size} bytes", va="center")
    return figure


def ring_zigzag():
    """Eight chunks of a sequence on a ring of four ranks, and the causal scores of each rank."""
    figure, axes = canvas(7.5, 3.9, 100, 52)
    chunks = 2 * RANKS
    owner = [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)]
    axes.text(24, 2, "one sequence in 8 chunks", ha="center")
    for chunk in range(chunks):
        box(axes, 4 + 5 * chunk, 4, 5, 5, SHADES[owner[chunk]], str(chunk))
    at = [(5, 16), (31, 16), (31, 36), (5, 36)]
    for rank, (x, y) in enumerate(at):
        axes.text(x + 6, y - 1.5, f"rank {rank}", ha="center")
        box(axes, x, y, 6, 6, SHADES[rank], str(rank))
        box(axes, x + 6, y, 6, 6, SHADES[rank], str(chunks - 1 - rank))
    for start, end in (
        ((18, 19), (30, 19)),
        ((37, 23), (37, 32.5)),
        ((30, 39), (18, 39)),
        ((11, 32.5), (11, 23)),
    ):
        arrow(axes, start, end, color=INK)
    moves = "keys and values\nmove by one rank\nin every hop"
    axes.text(24, 28.5, moves, ha="center", va="center")
    axes.text(76, 2, "keys and values of chunk", ha="center")
    axes.text(51.5, 26, "queries of chunk", ha="center", va="center", rotation=90)
    for row in range(chunks):
        axes.text(76 - 21.5, 8.5 + 5 * row, str(row), ha="center", va="center")
        axes.text(58.5 + 5 * row, 4.5, str(row), ha="center", va="center")
        for column in range(row + 1):
            corner = (56 + 5 * column, 6 + 5 * row)
            box(axes, *corner, 5, 5, EMPTY if row == column else SHADES[owner[row]])
            if row == column:
                x, y = corner
                half = [(x, y), (x, y + 5), (x + 5, y + 5)]
                axes.add_patch(
                    plt.Polygon(half, facecolor=SHADES[owner[row]], edgecolor=INK, linewidth=0.8)
                )
    axes.text(76, 49.5, "every rank computes 9/16 of the scores in its rows", ha="center")
    return figure


def all_to_all():
    """Tokens and heads of each rank before and after the all-to-all."""
    figure, axes = canvas(7.5, 3.1, 100, 41)
    for left, title in ((8, "outside attention"), (66, "inside attention")):
        axes.text(left + 14, 2, title, ha="center")
        axes.text(left + 14, 36, "heads", ha="center")
        axes.text(left - 2, 19, "tokens", ha="center", va="center", rotation=90)
        for row in range(RANKS):
            for column in range(RANKS):
                rank = row if left < 50 else column
                box(axes, left + 7 * column, 5 + 7 * row, 7, 7, SHADES[rank], str(rank))
    arrow(axes, (40, 14), (62, 14), color=INK)
    axes.text(51, 11, "all-to-all: q, k, v", ha="center")
    arrow(axes, (62, 24), (40, 24), color=INK)
    axes.text(51, 28, "all-to-all: output", ha="center")
    axes.text(50, 40, "the number in a cell is the rank that has it", ha="center")
    return figure


def expert_dispatch():
    """Dispatch and combine of four experts on two ranks, two slots each for every rank."""
    figure, axes = canvas(7.5, 4.4, 108, 58)
    for x, title in (
        (9, "tokens"),
        (33, "slots per expert"),
        (68, "experts"),
        (98, "output"),
    ):
        axes.text(x, 2, title, ha="center")
    routed = [[0, 2, 2, 1], [3, 3, 0, 3]]  # expert of each token, top-1
    for rank in range(2):
        top = 6 + 27 * rank
        axes.text(1, top + 9, f"rank {rank}", ha="center", va="center", rotation=90)
        filled = [0] * 4
        for token, expert in enumerate(routed[rank]):
            y = top + 5 * token
            slot, filled[expert] = filled[expert], filled[expert] + 1
            dropped = slot >= 2
            box(axes, 5, y, 8, 4, EMPTY if dropped else SHADES[expert], f"t{token}")
            box(axes, 94, y, 8, 4, EMPTY if dropped else SHADES[expert], f"t{token}")
            if dropped:
                axes.text(14, y + 2, "dropped", va="center", size=8)
            else:
                end = 28.5 + 5 * slot, top + 5 * expert + 2
                arrow(axes, (13, y + 2), end, color=INK, linewidth=0.7)
        for expert in range(4):
            y = top + 5 * expert
            for slot in range(2):
                full = slot < filled[expert]
                box(axes, 28 + 5 * slot, y, 5, 4, SHADES[expert] if full else EMPTY)
            axes.text(40, y + 2, f"expert {expert}", va="center", size=8)
        for member in range(2):
            expert = 2 * rank + member
            y = top + 10 * member
            box(axes, 60, y, 16, 8, SHADES[expert], f"MLP of\nexpert {expert}")
        arrow(axes, (77, top + 9), (93, top + 9), color=INK)
        axes.text(85, top + 13.5, "combine", ha="center", size=9)
    for rank in range(2):
        for target in range(2):
            arrow(axes, (50, 15 + 27 * rank), (59, 15 + 27 * target), color=INK)
    axes.text(20.5, 55.5, "dispatch", ha="center", size=9)
    axes.text(54.5, 55.5, "all-to-all", ha="center", size=9)
    axes.text(85, 55.5, "all-to-all and weighted sum", ha="center", size=9)
    return figure


def pipelines():
    """1F1B and ZB-H1 on the schedule simulator, with three equal passes."""
    figure, axes = canvas(8.5, 4.2, 34, 13.6)
    shade = {"F": SHADES[0], "B": SHADES[1], "BW": SHADES[1], "W": SHADES[2]}
    for number, name in enumerate(("1f1b", "zb-h1")):
        top = 1 + 6 * number
        rows = timeline(*instruction_streams(name, RANKS, 8), Cost(1, 1, 1))
        title = f"{name}: bubble {100 * bubble(rows):.0f} % of the time"
        axes.text(0, top - 0.4, title, weight="bold")
        for stage, row in enumerate(rows):
            axes.text(-0.4, top + stage + 0.5, f"stage {stage}", ha="right", va="center")
            for start, end, (_, micro, _) in row:
                middle = (start + end) / 2, top + stage + 0.5
                axes.text(*middle, str(micro), ha="center", va="center", size=8)
            for op, color in shade.items():
                spans = [(start, end - start) for start, end, (each, *_) in row if each == op]
                bar = top + stage, 1
                style = {"facecolor": color, "edgecolor": INK, "linewidth": 0.8}
                axes.broken_barh(spans, bar, clip_on=False, **style)
    legend = [("F", "forward"), ("B", "gradient of the input, or both"), ("W", "of the weights")]
    for (op, text), x in zip(legend, (0, 7, 20)):
        box(axes, x, 12.4, 1, 0.9, shade[op])
        axes.text(x + 1.4, 12.85, text, va="center")
    return figure


def planning_funnel():
    """Layouts after each step of `python -m hpc3d.plan gpt-3d-64 --ranks 64`."""
    figure, axes = canvas(7.5, 3.6, 100, 44)
    levels = [
        ("3,421,840 layouts", "405 mesh sizes and schemes, all allowed by the rules", 96),
        ("lower bounds", "116 sizes pruned: even their lower bound is too slow", 78),
        ("estimates", "37 sizes timed with 470 layouts, 252 sizes not visited", 62),
        ("simulation", "23 layouts simulated in full", 46),
        ("result", "10 layouts listed", 32),
    ]
    for number, (title, text, width) in enumerate(levels):
        y = 1 + 8.6 * number
        box(axes, 50 - width / 2, y, width, 7, SHADES[min(number, 3) if number < 4 else 0])
        color = EMPTY if number == 3 else INK
        axes.text(50, y + 2.4, title, ha="center", va="center", weight="bold", color=color)
        axes.text(50, y + 5.2, text, ha="center", va="center", size=8, color=color)
    return figure


def mesh_axes():
    """The 32 ranks of a mesh with p=2, d=2, x=2, y=2 and z=2, and the groups of rank 0."""
    figure, axes = canvas(7.5, 4.4, 100, 58)
    grid = Grid({"p": 2, "d": 2, "x": 2, "y": 2, "z": 2})
    for rank in range(grid.size):
        place = grid.coords(rank)
        x = 12 + 46 * place["d"] + 18 * place["y"] + 5 * place["z"]
        y = 10 + 27 * place["p"] + 9 * place["x"] - 4 * place["z"]
        shared = [axis for axis in grid.sizes if rank in grid.ranks_along(axis, {})]
        shade = SHADES[3] if rank == 0 else SHADES[1] if shared else EMPTY
        box(axes, x, y, 6, 5, shade, str(rank))
    for replica in range(2):
        axes.text(26 + 46 * replica, 2, f"replica, d={replica}", ha="center", weight="bold")
    for stage in range(2):
        text = f"stage\np={stage}"
        axes.text(5, 18 + 27 * stage, text, ha="center", va="center", weight="bold")
    for axis, tip, label in (("y", (97, 12), (98.5, 12)), ("z", (94, 7.5), (95, 6.5))):
        arrow(axes, (89, 12), tip, color=INK)
        axes.text(*label, axis, va="center")
    arrow(axes, (89, 12), (89, 23), color=INK)
    axes.text(89, 24.5, "x", ha="center", va="center")
    for x, shade, text in (
        (12, SHADES[3], "rank 0"),
        (34, SHADES[1], "shares an axis with rank 0"),
    ):
        box(axes, x, 54, 4, 3, shade)
        axes.text(x + 6, 55.5, text, va="center")
    return figure


FIGURES = {
    "mesh-axes": mesh_axes,
    "zero-stages": zero_stages,
    "ring-zigzag": ring_zigzag,
    "all-to-all": all_to_all,
    "expert-dispatch": expert_dispatch,
    "pipelines": pipelines,
    "planning-funnel": planning_funnel,
}


def write(figures):
    """Write one SVG file for each name and function of `figures`."""
    with matplotlib.rc_context(STYLE):
        for name, draw in figures.items():
            figure = draw()
            path = FOLDER / f"{name}.svg"
            text = StringIO()
            figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
            lines = re.sub(r' transform="rotate\(-0 [^"]*"', "", text.getvalue()).splitlines()
            path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")
            plt.close(figure)


if __name__ == "__main__":
    write(FIGURES)
