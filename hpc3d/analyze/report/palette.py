"""The colours of figures and pages: one meaning a colour on the whole page.

Okabe and Ito's colours, which the colour-blind tell apart, are what ranks do; all others were
chosen far from these and from each other, also as protanopes and deuteranopes see them
(Machado et al. 2009), and visible on white and on the page's dark ground.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

BLUE, ORANGE, GREEN, RED = "#56B4E9", "#E69F00", "#009E73", "#D55E00"
NAVY, PINK, YELLOW, WINE = "#0072B2", "#CC79A7", "#F0E442", "#882255"
SAND, GREY, LIGHT, PALE = "#C8B48C", "#707070", "#BDBDBD", "#E3D5EA"

# What a rank does: computation by phase, and of a call the part after and before the last arrival.
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
    "host": GREY,
}
UNRECORDED = PALE  # the rest of a step, of which no event says anything
PATH = "#E0007A"  # the critical path, which crosses boxes of all colours
LATE = "#B3123F"  # that others wait for a rank

# Sums over phases: all computation, and calls whose wait and transfer are not known.
COMPUTE, EXPOSED, RECORDED = "#3344DD", "#0099AA", "#2E6B4F"
READING, MARKER = "#66CCBB", "#4A4030"

# Calls by where they go, and what a stage does beside its passes.
AXES = ("#77AA66", "#DD8811", "#7766FF", "#773322", "#994400", "#FFDD77", "#FF99FF")
PLANES, WORLD = ("#BBEEAA", "#880077", "#4433AA"), "#4A5A9A"
REDUCTION = "#665500"

INSIDE, CROSSING = "#AA77FF", "#FFBB66"  # bytes that stay in a host, and others

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
    """Draw as matplotlib does by default, whatever a user's matplotlibrc says."""
    from matplotlib.style import context

    return context("default")
