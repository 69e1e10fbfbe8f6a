"""The figures of a report.  Only they need matplotlib, which the extra `report` installs."""

import numpy as np

# Okabe and Ito's colours, which the colour-blind tell apart, the light ones first.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#000000")


def draw_loss(runs, path):
    """Loss by step as PNG, a line a run; of several runs also their distance from the first.

    Runs of one model on several meshes have nearly the same loss: the lines get thinner from the
    first to the last, so that all of them show where they coincide.
    """
    figure, axes = _panels(len(runs))
    first = _losses(runs[0])
    widths = np.linspace(6.0, 1.2, len(runs)) if len(runs) > 1 else [1.8]
    for number, (run, width) in enumerate(zip(runs, widths)):
        colour, losses = COLOURS[number % len(COLOURS)], _losses(run)
        label = run.label.replace("$", r"\$")
        axes[0].plot(losses.keys(), losses.values(), label=label, **_line(colour, width))
        if number > 0:
            both = [step for step in losses if step in first]
            axes[1].plot(both, [losses[step] - first[step] for step in both], **_line(colour, 1.4))
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=200)


def _panels(runs):
    """A figure with the axes of the loss and, for several runs, of the difference under it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("figures need matplotlib: pip install 'hpc3d[report]'") from error
    rows = min(runs, 2)
    figure = Figure(figsize=(6.4, 2.4 + 1.6 * rows), layout="constrained")
    axes = figure.subplots(rows, sharex=True, squeeze=False, height_ratios=(2, 1)[:rows])[:, 0]
    axes[0].set_ylabel("loss [nat per token]")
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    if rows == 2:
        axes[1].set_ylabel("difference from\nthe first run [nat]")
        axes[1].ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
    return figure, axes


def _line(colour, width):
    """A line whose markers, of its own width, show only where a step stands alone."""
    return {"color": colour, "linewidth": width, "marker": "o", "ms": width, "mew": 0}


def _losses(run):
    """{step: loss}, not a number where it is not known."""
    return {row["step"]: np.nan if row["loss"] is None else row["loss"] for row in run.loss}
