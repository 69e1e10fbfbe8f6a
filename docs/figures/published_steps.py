"""Draw predicted against published step times, from the output of a benchmark.

python -m hpc3d.bench published | python docs/figures/published_steps.py
"""

import re
import sys

from parallel_training import INK, SHADES, plt, write

NUMBERS = r"([\d.]+) +([\d.]+) +([+-][\d.]+%)"
ROW = re.compile(rf"^ +([\d.]+[BT]) +(\d+) (full|selective) +{NUMBERS}", re.MULTILINE)


def published_steps(rows):
    """One line per run: published and predicted step time, and the error."""
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    names = [f"{model}, {ranks} GPUs, {recompute}" for model, ranks, recompute, *_ in rows]
    published, predicted = ([float(row[place]) for row in rows] for place in (3, 4))
    places = range(len(rows))
    axes.plot(published, places, "o", color=INK, fillstyle="none", label="published")
    axes.plot(predicted, places, "x", color=SHADES[3], label="predicted")
    for place, row in enumerate(rows):
        axes.text(130, place, row[5], va="center", size=8)
    axes.set_yticks(places, names)
    axes.set(xscale="log", xlim=(0.9, 200), xlabel="step time [s]")
    axes.invert_yaxis()
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    rows = ROW.findall(sys.stdin.read())
    write({"published-steps": lambda: published_steps(rows)})
