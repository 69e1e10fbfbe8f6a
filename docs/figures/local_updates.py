"""Draw the loss of local updates against communication and simulated time, from three sweeps.

python docs/figures/local_updates.py results/average results/nesterov results/simulated
"""

import csv
import sys
from pathlib import Path
from statistics import fmean

from parallel_training import INK, SHADES, plt, write

STEPS = 384
STYLES = {"mean": (SHADES[3], "o-"), "Nesterov momentum": (INK, "s--")}


def rows(folder):
    """Return {local steps: rows of a sweep}."""
    found = {}
    with (Path(folder) / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["parallel.local_steps"]), []).append(row)
    return found


def mean(table, steps, column):
    return fmean(float(row[column]) for row in table[steps])


def local_updates(losses, simulated):
    """Validation loss over received bytes and over simulated time; one line per outer optimizer.

    `losses` maps the name of an outer optimizer to the rows of its sweep.
    """
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    axes_of = {"received_bytes": 1e-6, "step_s": STEPS}
    labels = "received per step and rank [MB]", f"simulated time of {STEPS} steps [s]"
    for axes, (column, factor), label in zip(panels, axes_of.items(), labels, strict=True):
        for name, table in losses.items():
            color, line = STYLES[name]
            every = [steps for steps in sorted(table) if steps]
            x = [factor * mean(simulated, steps, column) for steps in every]
            y = [mean(table, steps, "validation_loss") for steps in every]
            axes.plot(x, y, line, color=color, label=name)
            for place, steps in enumerate(every):
                axes.annotate(
                    f"H = {steps}",
                    (x[place], y[place]),
                    (4, 4),
                    size=8,
                    textcoords="offset points",
                )
        synchronous = factor * mean(simulated, 0, column)
        loss = mean(losses["mean"], 0, "validation_loss")
        axes.plot(synchronous, loss, "x", color=INK, label="synchronous")
        axes.set(xscale="log", xlabel=label)
    panels[0].set_ylabel("validation loss")
    panels[1].legend(frameon=False, loc="center right")
    panels[1].minorticks_off()
    panels[1].set_xticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    return figure


if __name__ == "__main__":
    average, nesterov, simulated = map(rows, sys.argv[1:])
    losses = dict(zip(STYLES, (average, nesterov), strict=True))
    write({"local-updates": lambda: local_updates(losses, simulated)})
