"""Colors are distinguishable on light and dark backgrounds, also for color-blind readers."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from hpc3d.analyze.report import palette

GROUNDS = "#FFFFFF", "#14181F"  # of page/report.css
# What is seen of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(color, sight):
    """Return the CIELAB values of a color as seen by color-blind readers."""
    xyz = XYZ @ np.clip(sight @ linear(color), 0, 1) / (0.9505, 1, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    """Return the WCAG contrast: 1 for equal brightness, 21 for black on white."""
    low, high = sorted(XYZ[1] @ linear(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def colors():
    """Return a dict from meaning to color of the whole palette."""
    found = {}
    for name, value in vars(palette).items():
        if isinstance(value, dict) and name.isupper():
            found |= value
        elif isinstance(value, tuple) and isinstance(value[0], str):
            found |= {f"{name} {place}": color for place, color in enumerate(value)}
        elif isinstance(value, str) and name.isupper() and value not in palette.WORK.values():
            found[name] = value
    return found


def test_each_color_has_one_meaning():
    found = colors()
    found.pop("PALE")  # of unrecorded time
    assert len(found) > 40 and len({*found.values()}) == len(found)
    shared = {*palette.MEMORY} & {*palette.WORK}
    assert shared == {"optimizer"} and palette.MEMORY["optimizer"] == palette.WORK["optimizer"]


@pytest.mark.parametrize("sight", SIGHTS)
def test_work_colors_are_distinguishable_with_color_blindness(sight):
    seen = {
        name: lab(color, np.array(SIGHTS[sight]))
        for name, color in {**palette.WORK, "unrecorded": palette.UNRECORDED}.items()
    }
    apart = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(seen, 2)}
    assert min(apart.values()) > 10, min(apart, key=apart.get)


@pytest.mark.parametrize("sight", SIGHTS)
def test_adjacent_layer_colors_are_distinguishable_with_color_blindness(sight):
    seen = [lab(color, np.array(SIGHTS[sight])) for color in palette.LAYERS]
    assert min(np.linalg.norm(a - b) for a, b in pairwise([*seen, seen[0]])) > 10


@pytest.mark.parametrize("ground", GROUNDS)
def test_colors_contrast_with_the_page_background(ground):
    seen = {name: contrast(color, ground) for name, color in colors().items()}
    assert min(seen.values()) > 1.1, min(seen, key=seen.get)
    lines = {name: contrast(color, ground) for name, color in colors().items() if "RUNS" in name}
    assert min(seen["PATH"], *lines.values()) > 2.5
