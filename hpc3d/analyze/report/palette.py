"""Colors of figures and HTML pages. Each color has one meaning on a page.

The activities of ranks have colors from the color-blind safe palette of Okabe and Ito. All other
colors are distinguishable from these and from each other, including with protanopia and
deuteranopia (Machado et al. 2009), and are visible on the white and on the dark page background.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

BLUE, ORANGE, GREEN, RED = "#56B4E9", "#E69F00", "#009E73", "#D55E00"
NAVY, PINK, YELLOW, WINE = "#0072B2", "#CC79A7", "#F0E442", "#882255"
SAND, GRAY, LIGHT, PALE = "#C8B48C", "#707070", "#BDBDBD", "#E3D5EA"

# Colors of a rank's activities. Computation has one color per phase. A call is divided into the
# wait until the last rank arrives and the subsequent transfer.
WORK = {
    "forward": BLUE,
    "backward": RED,
    "backward_input": ORANGE,
    "backward_weight": GREEN,
    "recompute": YELLOW,
    "optimizer": WINE,
    "other": SAND,
    "transfer": NAVY,
    "wait": LIGHT,
    "copy": PINK,
    "host": GRAY,
}
UNRECORDED = PALE  # time not covered by any event
PATH = "#E0007A"  # critical path, which is drawn on top of boxes of all colors
MARK = "#808080"  # resume of a run, on light and dark pages
BAND = 0.2  # opacity of the range of the curves of a group
LATE = "#B3123F"  # wait time that a rank imposes on other ranks

# Colors of totals over all phases: computation, exposed communication, and all recorded events.
COMPUTE, EXPOSED, RECORDED = "#3344DD", "#0099AA", "#2E6B4F"
READING, MARKER = "#66CCBB", "#4A4030"

# Colors of communication: along a mesh axis, within a plane of two axes, among all ranks, between
# the groups of hybrid sharding, and in the gradient reduction of a stage.
AXES = ("#77AA66", "#DD8811", "#7766FF", "#773322", "#994400", "#FFDD77", "#FF99FF")
PLANES, WORLD = ("#BBEEAA", "#880077", "#4433AA"), "#4A5A9A"
COPIES = "#5588AA"
REDUCTION = "#665500"

# Colors of the bytes that a host receives from its own ranks and from other hosts.
INSIDE, CROSSING = "#AA77FF", "#FFBB66"

MEMORY = {
    "parameter": "#5511CC",
    "gradient": "#DDAA55",
    "optimizer": WINE,
    "activation": "#EEDDCC",
    "communication": "#BB88FF",
    "workspace": "#773300",
    "offloaded": "#AAAACC",
}

# Colors of the layers in the picture of a layout. They repeat after the last one.
LAYERS = ("#4E79A7", "#F28E2B", "#59A14F", "#B07AA1", "#9C755F", "#76B7B2")
# Lengths of dashes and gaps of the curves of runs, in turn. The first curve is solid.
DASHES = ((), (5, 2), (2, 1), (6, 2, 2, 2))
DOTS = (1, 2)  # of the validation curve of a run, which has the color of its training curve
RUNS = ("#4466CC", "#DD5544", "#776688", "#2A9D8F", "#6633FF", "#B5651D", "#A23E9C")


def default_style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib uses its default style and ignores matplotlibrc."""
    from matplotlib.style import context

    return context("default")
