"""The page docs/schedules.md: python -m hpc3d.pipeline.schedules_page > docs/schedules.md."""

from inspect import getdoc

from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.passes import in_flight
from hpc3d.pipeline.schedule import SCHEDULES, Schedule, instruction_streams
from hpc3d.pipeline.timeline import Cost, bubble, timeline

_HEAD = """\
# Pipeline schedules

The schedules that `parallel.schedule` names, on 4 stages and 8 microbatches, as the program runs
them (`python -m hpc3d.pipeline.schedules_page > docs/schedules.md`, which a test compares).
`python -m hpc3d.simulate schedule` draws other sizes and costs.

A line is a stage, time goes to the right. F is a forward pass, B the gradient of its input, W that
of its weights, and a number the microbatch; without a W, B is both gradients. Small letters are
chunk 1 of the stage, a bar is an update between two microbatches, and blank is the bubble. Here
T_F = T_B = T_W, and messages are free.

In the texts p is the number of stages, i a stage from 0, m the microbatches of a step, v the
chunks of a stage, T_F, T_B and T_W the times of the passes, t_f = T_F and t_b = T_B + T_W. "In
flight" are microbatches between their F and the end of their B, whose activations a stage keeps;
from there to the end of W it keeps the inputs and gradients of the products that W computes. Under
each diagram stand the peaks of both, which need not fall together. They count chunks: one of two
has half of a stage's activations.
"""

_TAIL = """\
## What asynchronous means here

`pipedream` and `pipedream-2bw` run on across training steps: the microbatches of all steps are one
stream, which fills once and drains at the end of the run only. The price is that gradients are of
older weights. How old is known from the schedule alone: on stage i, p-1-i updates with
`pipedream`, one update with `pipedream-2bw`, so never more than the depth of the pipeline. The
backward pass of a microbatch always uses the weights of its forward pass, which the stage has
stashed, so each gradient is the gradient of some weights that the stage had.

No other asynchrony is offered. Replicas along the data axis that update without waiting for each
other are not: how stale their gradients are has no bound and depends on timing, so no run could be
repeated, or compared with a serial model.

## Schedules of your own

`parallel.schedule = "csv:FILE"` reads a schedule from a file: one row per stage, one cell per
instruction (`F0`, `B0`, `W0`, `BW0`; `1F0` is chunk 1). A first row of the one word `turn` lays
the parts of two chunks as those of `zb-v`. Messages, reductions and the optimiser are added, and
what cannot run is refused: with the row and the column, or with the instructions at which the
stages would wait for each other. `python -m hpc3d.simulate schedule ... --csv FILE` writes such a
file.
"""


def page() -> str:
    """The text of the page."""
    return "\n".join([_HEAD, *(_section(schedule) for schedule in SCHEDULES.values()), _TAIL])


def _section(schedule: Schedule) -> str:
    """Text, diagram and numbers of a schedule; the text is that of its function."""
    stages, micros, steps = _sizes(schedule)
    chunks = schedule.chunks or 2
    passes, placement = instruction_streams(schedule.name, stages, micros, chunks, steps)
    rows = timeline(passes, placement, Cost(1, 1, 1))
    peaks = [in_flight(stream) for stream in passes]
    activations, kept = (" ".join(map(str, numbers)) for numbers in zip(*peaks))
    waiting = f"; waiting for W {kept}" if schedule.splits_backward else ""
    return (
        f"## {schedule.name}\n\n{getdoc(schedule.generate)}\n\n"
        f"```text\n{draw(rows, columns=125)}\n```\n\n"
        f"Bubble {bubble(rows):.4f} of the time. "
        f"In flight from stage 0 on: {activations}{waiting}.\n"
    )


def _sizes(schedule):
    """(stages, microbatches of a step, steps): 8 microbatches in all."""
    if schedule.forbids(4, 8, schedule.chunks or 2):
        return 1, 8, 1
    generations = schedule.asynchronous and not schedule.update_per_microbatch
    return (4, 4, 2) if generations else (4, 8, 1)


if __name__ == "__main__":
    print(page(), end="")
