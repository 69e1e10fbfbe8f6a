"""Draw the loss of local updates against communication and simulated time, from five sweeps.

python docs/figures/local_updates.py results/average results/nesterov results/simulated \
    results/stale results/stale-simulated
"""

import csv
import sys
from pathlib import Path
from statistics import fmean

from parallel_training import INK, SHADES, plt, write

STEPS = 384
STYLES = {
    "mean": (SHADES[3], "o-"),
    "Nesterov momentum": (INK, "s--"),
    "blocking": (SHADES[3], "o-"),
    "stale": (INK, "s--"),
}


def rows(folder):
    """Return {local steps: rows of a sweep}."""
    found = {}
    with (Path(folder) / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["parallel.local_steps"]), []).append(row)
    return found


def mean(table, steps, column):
    return fmean(float(row[column]) for row in table[steps])


def local_updates(lines, synchronous):
    """Validation loss versus received bytes and versus simulated time.

    `lines` maps the name of each line to the rows of its training runs and of its simulations.
    `synchronous` is the name of the line that also has runs without local updates.
    """
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    axes_of = {"received_bytes": 1e-6, "step_s": STEPS}
    labels = "received per step and rank [MB]", f"simulated time of {STEPS} steps [s]"
    for axes, (column, factor), label in zip(panels, axes_of.items(), labels, strict=True):
        for name, (table, simulated) in lines.items():
            color, line = STYLES[name]
            every = [steps for steps in sorted(table) if steps]
            x = [factor * mean(simulated, steps, column) for steps in every]
            y = [mean(table, steps, "validation_loss") for steps in every]
            axes.plot(x, y, line, color=color, label=name)
            for place, steps in enumerate(every):
                above = (color == INK) != (steps in (every[0], every[-1]))
                axes.annotate(
                    f"H = {steps}",
                    (x[place], y[place]),
                    (4, 4 if above else -11),
                    size=8,
                    textcoords="offset points",
                )
        table, simulated = lines[synchronous]
        loss = mean(table, 0, "validation_loss")
        axes.plot(factor * mean(simulated, 0, column), loss, "x", color=INK, label="synchronous")
        axes.set(xscale="log", xlabel=label)
    panels[0].set_ylabel("validation loss")
    panels[1].legend(frameon=False)
    for axes, ticks in zip(panels, ([0.02, 0.05, 0.1, 0.2, 0.5], [0.5, 1, 2, 3]), strict=True):
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return figure


if __name__ == "__main__":
    average, nesterov, simulated, stale, overlapping = map(rows, sys.argv[1:])
    outer = {"mean": (average, simulated), "Nesterov momentum": (nesterov, simulated)}
    sync = {"blocking": (average, simulated), "stale": (stale, overlapping)}
    write(
        {
            "local-updates": lambda: local_updates(outer, "mean"),
            "stale-agreements": lambda: local_updates(sync, "blocking"),
        }
    )
