"""The page docs/trace.md: python -m hpc3d.trace.trace_page > docs/trace.md."""

from hpc3d.trace.schema import ATTRIBUTES, ENUMS, LAYOUT, TEXT

_HEAD = """\
# The trace file

A run leaves `trace.h5`: when each rank did what, what it received, how much memory it held, and
what a step came to. Reports read this file and nothing else, and so can you. A simulated run
writes the same tables, and a prediction lies beside the measurement that it is compared with. This
page is written from the definitions in `hpc3d/trace/schema.py` by
`python -m hpc3d.trace.trace_page > docs/trace.md`, and a test compares the two.

The file is HDF5: one group per table, one dataset per column. Columns of a table have one length,
but for `/groups/members`. Every dataset has the attributes `units` and `description`, every group
a `description`. Columns are stored in chunks of 64 Ki rows with HDF5's own filters shuffle, gzip
and fletcher32, so that every HDF5 program reads them; text has variable length and no filter.
Enumerations have their names in the type. A program that reads version 1 ignores tables and
columns that it does not know.

Until a run ends, its trace is `RUN/trace/rank-RRRRR-NNNN.npz`: what a rank recorded between two
writes, each file whole or absent, so that a run that is killed loses at most what was recorded
since the last one. `python -m hpc3d.report RUN` makes `trace.h5` of what is there, again when
ranks have written more since.

Of a run that goes on (`train --resume`), `trace.h5` has all of it: what was done before the step
that it went on with, then what was done from there, each step once. Numbers of calls go on, and so
do times, unless the host was started again or is another one: then the times of the attempt are
moved by what passed on the wall. What the file was when each attempt ended, with the steps that
were undone, is `trace-1.h5`, `trace-2.h5` and so on. An attempt on another layout has a file of
its own, and `missing` names the one before.

## Attributes of the root
"""

_TABLES = """\
## Tables

Types are those of NumPy. An index counts the rows of the table that is named with it.
"""

_ENUMERATIONS = """\
## Enumerations

The number that is stored, and its name.
"""

_RELATIONS = """\
## How rows relate

**A rank's time.** On one `stream` of a rank no row overlaps another one, unless one encloses the
other; then the inner one has the outer one's row as its `parent`. So the rows of a step without a
parent add up to at most the step, and what they leave is time in which nothing was recorded.

**Streams.** A rank that computes on a GPU has five, and its rows of computation are what the
device did, not the host that asked for it:

| stream | rows |
|---|---|
| 0 | what the host does by itself: reading, saving, calls of all ranks on the host's numbers |
| 1 | what the device computes; of a call (`comm`) the time in which it stands still for a block |
| 2 | calls as they run, of category `copy` with `seq` -1; messages that leave together are one |
| 3 | the same of calls along d, which have a queue of their own |
| 4 | copies to the host and from there of what is offloaded, of category `copy` with their bytes |

Streams run beside each other, so their times do not add up. A rank's time is that of stream 1, and
of stream 0 where stream 1 has nothing; rows of the others may go on when their step is over.
A row begins when the device comes to it: where the host is late, it has a part of the wait for the
host. `forward_s` and `backward_s` of a step are the rows of stream 1 in these phases. Times come
from CUDA events, which no step waits for: they are whole half microseconds from a reference that
is taken at the begin and at the end of each step, while the device has nothing to do, between two
looks at the host's clock. The row `clock of the device` spans the two looks, so all times of the
step may be wrong together by half of its duration. Of a CUDA graph that is replayed only the whole
is known.

**A call** posts a collective, a send or a receive, and is waited for later, perhaps at once. The
row of category `comm` is the wait for its block: `t_start` is when the wait began, `posted` when
the call was made. Where something lay in between, the call itself is a row of category `copy`,
with `seq` -1 and no bytes; between the two rows the rank was free to compute while the block was
in flight. (A broadcast waits when it is called, too: the size of the block goes ahead of it. So
its row of category `copy` may be long.) Where nothing lay in between, one row spans both and
`posted` is its `t_start`. The other categories that ranks record are `compute`, with norm and
update `optimizer`, and on the rank that reads the text `io`.

**A copy** of what is offloaded is a row of category `copy` without a group, `offload` or `fetch`,
with its `bytes`. On a CPU the rank does nothing else meanwhile; on a GPU it is a row of stream 4,
and what stream 1 waits for one is a row of category `wait`.

**A group** is the ranks that communicate along one mesh axis, a row of `/groups`: those of
`/groups/members` from `offset` on, `size` of them. The collectives of a group are numbered by
`seq`: rows of category `comm` with one `group` and `seq` are one collective, one row per member.
Messages are numbered by themselves, from each sender to each receiver: `group`, sender, receiver
and `seq` name the two ends of one. The sender's row is a `send` whose `peer` is the receiver, the
receiver's is a `recv` whose `peer` is the sender. Nothing is matched by name or by time.

**Bytes** of a collective are what the rank must receive under an algorithm that is optimal in
bandwidth, whatever the library does. Of a group of g ranks:

| op | bytes |
|---|---|
| all_gather, reduce_scatter, all_to_all | (1-1/g) of the gathered size |
| all_reduce | 2 (1-1/g) of the block |
| broadcast | the block; 0 at the root |
| reduce | the block; 0 at the member after the root, where the chain to it begins |
| send, recv | the block |

Received bytes are those of category `comm` without the operation `send`.

**Clocks.** `t_start` and `posted` are nanoseconds of the monotonic clock of the rank's host, as
they were read. `t_global` is `t_start` on the clock of rank 0, through `/clock/model`, which is
fitted to the exchanges in `/clock/samples`; ranks of one host share a clock and a model. To
compare `posted` between ranks, add `t_global - t_start`. Steps have raw times only. The residual
of the model and the round trips of the samples say how far hosts can be compared.

**Experts.** A token counts on one of the ranks that decide where it goes, so the rows of
`/experts` of a step and a layer add up to all choices of its tokens, over ranks, microbatches and
experts; those of `/routers` add up to what the routers add to the summed loss of the step. Passes
that run again, and those of an evaluation, are not counted, nor is a simulated run. Dispatch and
combine are the calls all_to_all of groups along e: in a forward pass of a layer first the
dispatch, in a backward pass first the combine.

**Memory** is that of arrays, by what they are for: what is live at the end of a step, and the
highest of the step. The peaks of different kinds need not fall together: the peak of the kind
`all`, what a rank held at one time, is at most their sum, and decides whether a run fits. Older
traces are without it.

**A prediction** has one row per quantity, -1 where a column does not apply: the quantity `step_s`
with step, stage and rank -1 is the time of any step.

`hpc3d.trace.checks_per_rank.violations(trace)` tests all this, and says where a trace breaks it.

## Reading it

In Python, columns are read when they are asked for. A file that is damaged, or made to harm, is
refused with a ValueError of one line that says what is wrong:

```python
import hpc3d.trace

with hpc3d.trace.open("results/RUN") as trace:  # or its trace.h5
    duration = trace.events["dur"]  # NumPy, a whole column
    mine = trace.events["dur", trace.rows(3)]  # of rank 3 only
    names = [trace.strings[i] for i in trace.events["name"]]
    trace.groups[0]  # Group(axis="x", members=(0, 1))
    trace.attrs["complete"], trace.attrs["missing"]
    [*trace.calibration]  # (op, axis) of the calls that were measured by themselves, if any
    {call: table.attrs["beta"] for call, table in trace.calibration.items()}  # s/B
```

In pandas, with names in place of numbers:

```python
    events = trace.events.frame(["rank", "step", "category", "op", "group", "dur", "bytes"])
    events["axis"] = events["group"].map(lambda i: trace.groups[i].axis if i >= 0 else "")
    events.groupby(["category", "op", "axis"], observed=True)[["dur", "bytes"]].sum()
```

From the shell, with HDF5's tools:

```sh
h5ls -r trace.h5              # what is there
h5dump -A trace.h5            # every table and column with its unit and meaning
h5ls -v -d trace.h5/steps     # a table: types, units, meanings and values
```

With h5py alone, the rows of rank 3 and what they are:

```python
import h5py

with h5py.File("trace.h5") as file:
    start, end = file["index/rank_ptr"][3:5]
    operation = file["events/op"][start:end]
    code = h5py.check_enum_dtype(file["events/op"].dtype)  # {"gemm": 1, ...}
    gemms = file["events/dur"][start:end][operation == code["gemm"]]
```
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, _attributes(), _TABLES, *map(_section, [*LAYOUT][1:]), _ENUMERATIONS]
    return "\n".join([*parts, *map(_enumeration, ENUMS), _RELATIONS])


def _attributes():
    rows = [
        (f"`{each.name}`", each.type.__name__, each.description, "yes" if each.required else "")
        for each in ATTRIBUTES
    ]
    return _table(("attribute", "type", "meaning", "always there"), rows)


def _section(path):
    """Heading, description and columns of a table, or of a group of tables."""
    table = LAYOUT[path]
    rows = [(f"`{c.name}`", _type(c), _unit(c), c.description) for c in table.columns]
    columns = ["", _table(("column", "type", "unit", "meaning"), rows)] if rows else [""]
    return "\n".join([f"### `/{path}`", "", table.description, *columns])


def _type(column):
    return "text" if column.type == TEXT else column.type


def _unit(column):
    """The unit; of an index the table that it counts."""
    if column.unit == "index" and column.into:
        return f"row of /{column.into}"
    return {"1": "", "text": ""}.get(column.unit, column.unit)


def _enumeration(name):
    values = ", ".join(f"{code} {label}" for code, label in enumerate(ENUMS[name]))
    return f"**{name}**: {values}.\n"


def _table(heading, rows):
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
