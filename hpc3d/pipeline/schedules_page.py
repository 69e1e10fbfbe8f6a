"""Generator of docs/schedules.md: python -m hpc3d.pipeline.schedules_page > docs/schedules.md."""

from inspect import getdoc

from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.schedule import SCHEDULES, Schedule, instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, bubble, timeline

_HEAD = """\
# Pipeline schedules

This page draws every schedule that `parallel.schedule` can name, on 4 stages and 8 microbatches.
Use it to compare the bubble and the memory of the schedules. [parallelism.md](parallelism.md)
explains pipeline parallelism.

The diagrams come from the instructions that a run executes. The command
`python -m hpc3d.pipeline.schedules_page > docs/schedules.md` writes the page, and a test compares
the two. For other sizes and times, use `python -m hpc3d.simulate schedule`.

## How to read the diagrams

Each line is a stage, and time runs to the right. F is a forward pass, B computes the gradient of
its input, and W the gradient of its weights. The number is the microbatch. If a schedule has no W,
B computes both gradients. Small letters belong to chunk 1 of a stage. A bar marks an update
between two microbatches, and blank space is the bubble. The diagrams assume T_F = T_B = T_W and
free messages.

The descriptions use these symbols:

- p is the number of stages, i the stage from 0, m the number of microbatches per step, and v the
  number of model chunks per stage.
- T_F, T_B and T_W are the times of the passes, t_f = T_F and t_b = T_B + T_W.

A microbatch is in flight from its F to the end of its B, and its activations are saved for that
time. From then until the end of its W, a stage saves the inputs and gradients of the products that
W computes. The peaks of both are below each diagram, and they need not occur at the same time.
They count chunks: with two chunks per stage, a chunk has half of the activations of the stage.
"""

_TAIL = """\
## Asynchronous schedules

`pipedream` and `pipedream-2bw` do not drain between training steps. The microbatches of all steps
form one stream, which fills the pipeline once and drains it at the end of the run. In exchange,
gradients belong to older weights. Their age follows from the schedule: on stage i, p-1-i updates
with `pipedream` and one update with `pipedream-2bw`. The age never exceeds the depth of the
pipeline.

The backward pass of a microbatch always uses the weights of its forward pass, which the stage has
stashed. Each gradient is therefore the exact gradient at weights that the stage had before.

hpc3d has no other asynchronous training. In particular, replicas along the data axis never update
independently: the staleness of their gradients would be unbounded and would depend on timing. Such
a run could not be repeated or compared with a serial model.

## Custom schedules

`parallel.schedule = "csv:FILE"` reads a schedule from a file with one row per stage and one cell
per instruction: `F0`, `B0`, `W0` or `BW0`. `1F0` is a forward pass of chunk 1. If the first row is
the single word `turn`, two chunks per stage are placed as in `zb-v`. hpc3d adds the messages, the
reductions and the optimizer.

An invalid schedule is rejected before training. The message names the row and the column, or the
instructions at which the stages would deadlock. `python -m hpc3d.simulate schedule ... --csv FILE`
writes such a file.
"""


def page() -> str:
    """Return the Markdown text of the page."""
    return "\n".join([_HEAD, *(_section(schedule) for schedule in SCHEDULES.values()), _TAIL])


def _section(schedule: Schedule) -> str:
    """Return the section about a schedule: its generator's docstring, a diagram and the peaks."""
    stages, micros, steps = _sizes(schedule)
    chunks = schedule.chunks or 2
    passes, placement = instruction_streams(schedule.name, stages, micros, chunks, steps)
    rows = timeline(passes, placement, Cost(1, 1, 1))
    peaks = [in_flight(stream) for stream in passes]
    activations, kept = (" ".join(map(str, numbers)) for numbers in zip(*peaks))
    waiting = f"; waiting for W: {kept}" if schedule.splits_backward else ""
    return (
        f"## {schedule.name}\n\n{getdoc(schedule.generate)}\n\n"
        f"```text\n{draw(rows, columns=125)}\n```\n\n"
        f"Bubble: {bubble(rows):.4f} of the time. "
        f"In flight, from stage 0: {activations}{waiting}.\n"
    )


def _sizes(schedule):
    """Return the numbers of stages, microbatches per step, and steps (8 microbatches in total)."""
    if schedule.forbids(4, 8, schedule.chunks or 2):
        return 1, 8, 1
    generations = schedule.asynchronous and not schedule.update_per_microbatch
    return (4, 4, 2) if generations else (4, 8, 1)


if __name__ == "__main__":
    print(page(), end="")
