"""Draw a forward and a backward pass with experts: python docs/figures/expert_overlap.py

The times are those of a simulated step of gshard-600b with 8 layers on 256 H100 GPUs.
"""

import numpy as np
from matplotlib.patches import Patch
from parallel_training import SHADES, plt, write

from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import load_resolved, simulate
from hpc3d.trace.schema import CATEGORY, OP, PHASE

COMPUTE, COMM = CATEGORY.index("compute"), CATEGORY.index("comm")
LAYOUT = (
    "--model.layers 8 --mesh.d 1 --mesh.e 64 --mesh.x 4 --mesh.y 1 --mesh.z 1 "
    "--parallel.scheme 1d-sequence --parallel.schedule dualpipe-v --parallel.microbatches 2"
)
LINES = "computation", "all-to-all"
NAMES = {"forward pass": SHADES[0], "backward pass": SHADES[2]}


def passes(overlap):
    """Rows of the forward pass of microbatch 1 and of the backward pass of microbatch 0."""
    options = f"{LAYOUT} --parallel.overlap_experts {overlap}".split()
    config = load_resolved("gshard-600b", options, 256)
    (run,) = simulate(config, config.model.vocabulary, load("h100"))
    kinds = [(1, 0, "forward"), (0, 1, "backward")]
    both = [
        run.rows[
            (run.rows["microbatch"] == micro)
            & (run.rows["chunk"] == chunk)
            & (run.rows["phase"] == PHASE.index(phase))
        ]
        for micro, chunk, phase in kinds
    ]
    return both, min(rows["t_start"].min() for rows in both)


def expert_overlap():
    """One panel without and one with the overlap."""
    figure, panels = plt.subplots(2, 1, figsize=(7.5, 3.6), sharex=True, layout="constrained")
    titles = {"false": "one pass after the other", "true": "alternating passes"}
    for axes, (overlap, title) in zip(panels, titles.items(), strict=True):
        both, begin = passes(overlap)
        for rows, color in zip(both, NAMES.values(), strict=True):
            calls = rows[(rows["op"] == OP.index("all_to_all")) & (rows["category"] == COMM)]
            work = rows[rows["category"] == COMPUTE]
            starts = work["t_start"], calls["posted"]
            ends = work["t_start"] + work["dur"], calls["t_start"] + calls["dur"]
            for line, (start, end) in enumerate(zip(starts, ends, strict=True)):
                bars = np.column_stack([start - begin, end - start]) / 1e6
                axes.broken_barh(bars, (line + 0.1, 0.8), color=color, linewidth=0)
        axes.set(ylim=(2, 0), title=title)
        axes.set_yticks([0.5, 1.5], LINES)
    panels[1].set(xlabel="time [ms]", xlim=(0, None))
    handles = [Patch(color=color, label=name) for name, color in NAMES.items()]
    figure.legend(handles=handles, frameon=False, ncols=2, loc="outside upper right")
    return figure


if __name__ == "__main__":
    write({"expert-overlap": expert_overlap})
