"""Colors of figures and pages. Each color has one meaning on a page.

The activities of ranks use the color-blind safe palette of Okabe and Ito. All other colors were
selected to be distinguishable from these and from each other, also for protanopes and deuteranopes
(Machado et al. 2009), and to be visible on white and on the dark background of the page.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

BLUE, ORANGE, GREEN, RED = "#56B4E9", "#E69F00", "#009E73", "#D55E00"
NAVY, PINK, YELLOW, WINE = "#0072B2", "#CC79A7", "#F0E442", "#882255"
SAND, GRAY, LIGHT, PALE = "#C8B48C", "#707070", "#BDBDBD", "#E3D5EA"

# Activities of a rank. Computation is colored by phase. The time in a call is split at the last
# arrival into wait and transfer.
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
PATH = "#E0007A"  # critical path, drawn over boxes of all colors
LATE = "#B3123F"  # imposed wait of a straggler

# Totals over phases: computation, and time in calls if wait and transfer are unknown.
COMPUTE, EXPOSED, RECORDED = "#3344DD", "#0099AA", "#2E6B4F"
READING, MARKER = "#66CCBB", "#4A4030"

# Calls by mesh axis, plane or world, and the gradient reduction of a stage.
AXES = ("#77AA66", "#DD8811", "#7766FF", "#773322", "#994400", "#FFDD77", "#FF99FF")
PLANES, WORLD = ("#BBEEAA", "#880077", "#4433AA"), "#4A5A9A"
REDUCTION = "#665500"

INSIDE, CROSSING = "#AA77FF", "#FFBB66"  # bytes from the same host and from other hosts

MEMORY = {
    "parameter": "#5511CC",
    "gradient": "#DDAA55",
    "optimizer": WINE,
    "activation": "#EEDDCC",
    "communication": "#BB88FF",
    "workspace": "#773300",
    "offloaded": "#AAAACC",
}
RUNS = ("#4466CC", "#DD5544", "#776688", "#2A9D8F", "#6633FF", "#B5651D", "#A23E9C")


def default_style() -> AbstractContextManager[None]:
    """Return a context with matplotlib's default style, independent of the user's matplotlibrc."""
    from matplotlib.style import context

    return context("default")
