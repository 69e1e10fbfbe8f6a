"""Generator of docs/schedules.md: python -m hpc3d.pipeline.schedules_page > docs/schedules.md."""

from inspect import getdoc

from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.schedule import SCHEDULES, Schedule, instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, bubble, timeline

_HEAD = """\
# Pipeline schedules

This page shows a diagram of every schedule that you can select with `parallel.schedule`, for 4
stages and 8 microbatches. Use the page to compare the bubbles and the memory of the schedules.
[parallelism.md](parallelism.md) explains pipeline parallelism.

The diagrams are drawn from the instructions that a run executes. The command
`python -m hpc3d.pipeline.schedules_page > docs/schedules.md` generates this page, and a test
checks that the page is up to date. To draw a schedule for other sizes and pass times, use
`python -m hpc3d.simulate schedule`.

## How to read the diagrams

Each line is a stage, and time runs to the right. F is a forward pass, B computes the input
gradient, and W computes the weight gradients. The number after the letter is the index of the
microbatch. If a schedule has no W, B computes both gradients. Lowercase letters are passes of
chunk 1 of a stage. A vertical bar marks a weight update between two microbatches, and blank space
is the bubble. The diagrams assume T_F = T_B = T_W and zero communication time.

The descriptions use these symbols:

- p is the number of stages, i the zero-based stage index, m the number of microbatches per step,
  and v the number of model chunks per stage.
- T_F, T_B and T_W are the durations of the passes F, B and W; t_f = T_F and t_b = T_B + T_W.

A microbatch is in flight from the start of its F to the end of its B, and its activations are
saved during this time. From the end of B to the end of W, a stage saves the inputs and output
gradients of the matrix products whose weight gradients W computes. The line below each diagram
shows the peak numbers of microbatches in flight and of microbatches waiting for W on each stage;
the two peaks need not occur at the same time. With two chunks per stage, the numbers count
chunks, each of which has half of the activations of the stage.
"""

_TAIL = """\
## Asynchronous schedules

`pipedream` and `pipedream-2bw` do not drain the pipeline between training steps. The microbatches
of all steps form one stream, which fills the pipeline at the start of the run and drains it at the
end. In exchange, gradients are computed with stale weights. The staleness follows from the
schedule: on stage i, p-1-i updates with `pipedream` and one update with `pipedream-2bw`. It never
exceeds the number of pipeline stages.

The backward pass of a microbatch always uses the same weights as its forward pass, because the
stage stores these weights (weight stashing). Each gradient is therefore the exact gradient at an
earlier version of the stage's weights.

No other schedule uses stale weights. [Local updates](local-updates.md) are a second form of
asynchronous training: data-parallel replicas update their weights independently for a fixed
number of steps before they average their parameters. In both forms, the staleness is fixed by
the input file and does not depend on timing. A run can therefore be repeated, and its results can
be compared with a serial model.

## Custom schedules

`parallel.schedule = "csv:FILE"` reads a schedule from a CSV file with one row per stage and one
cell per instruction: `F0`, `B0`, `W0` or `BW0`. `1F0` is the forward pass of microbatch 0 through
chunk 1. If the first row contains only the word `turn`, the two chunks per stage are placed as in
`zb-v`. hpc3d adds the messages, the gradient reductions and the optimizer steps.

An invalid schedule is rejected before training. The error message names the row and the column, or
the instructions at which the stages would deadlock. To write a schedule to such a file, run
`python -m hpc3d.simulate schedule ... --csv FILE`.

## Schedule search

The known schedules assume equal stages. If the pass times differ between stages, or if memory
limits the number of microbatches in flight, search for a schedule:

    python -m hpc3d.simulate schedule --name search --stages 3 --microbatches 8 --forward 2,3,1
    python -m hpc3d.plan gpt-4d-64 --ranks 64 --schedule search --memory 40GB --csv found.csv

`simulate schedule` searches for given pass times. `--memory N` sets the maximum number of
microbatches with saved data on each stage, from the start of F to the end of W. `plan` computes
the pass times and the saved bytes of a layout. It verifies the peak memory of the schedule in a
simulation of the full step. `--csv` writes a custom schedule, which `train` runs.

The search considers schedules with one model chunk per stage and a split backward pass. It starts
from known schedules and list schedules, and moves single passes on the critical path (simulated
annealing). It also computes a lower bound on the makespan of all such schedules with the same
memory limits. The proven gap is makespan / bound - 1. A gap of 0 means that the schedule is
optimal.

The tests compare the search with an exact solver for workloads with up to 3 unequal stages and 4
microbatches. In 2,200 random workloads, the makespan was at most 4 % above the optimum, and the
bound at most 15 % below it. For 4 to 16 stages and up to 128 microbatches, the proven gap was at
most 12 %.
"""


def page() -> str:
    """Return the Markdown text of the page."""
    return "\n".join([_HEAD, *(_section(schedule) for schedule in SCHEDULES.values()), _TAIL])


def _section(schedule: Schedule) -> str:
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
        f"Bubble rate: {bubble(rows):.4f}. "
        f"Peak number of microbatches in flight on stages 0, 1, ...: {activations}{waiting}.\n"
    )


def _sizes(schedule):
    """Return the sizes of a diagram: numbers of stages, microbatches per step, and steps."""
    if schedule.forbids(4, 8, schedule.chunks or 2):
        return 1, 8, 1
    generations = schedule.asynchronous and not schedule.update_per_microbatch
    return (4, 4, 2) if generations else (4, 8, 1)


if __name__ == "__main__":
    print(page(), end="")
