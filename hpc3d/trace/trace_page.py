"""Generator of docs/trace.md: python -m hpc3d.trace.trace_page > docs/trace.md."""

from hpc3d.trace.schema import ATTRIBUTES, ENUMS, LAYOUT

_HEAD = """\
# The trace file

This page describes every table and column of `trace.h5`, and shows how to read the file from
Python and from the shell. A trace contains the events, the received bytes and the
memory use of each rank, and the results of every step.

Reports read only this file, and you can use it for your own analyses. A simulated run writes the
same tables. A predicted step is stored in the same file as the measured ones.
`python -m hpc3d.trace.trace_page > docs/trace.md` generates this page from
`hpc3d/trace/schema.py`, and a test compares the two.

The file is HDF5: one group per table, one dataset per column. All columns of a table have the same
length, except `/groups/members`. Every dataset has the attributes `units` and `description`, and
every group has a `description`. Columns are stored in chunks of 64 Ki rows with HDF5's built-in
filters shuffle, gzip and fletcher32, so every HDF5 program can read them. Strings have variable
length and no filter. Enumerated types contain their names. A program for version 1 must ignore
tables and columns that it does not know.

## When the file is written

During a run, each rank writes segments `RUN/trace/rank-RRRRR-NNNN.npz` with the events since its
previous segment. Writes are atomic, so a killed run loses at most the events since the last
segment. `python -m hpc3d.report RUN` merges the segments into `trace.h5`, and merges them again if
there are new ones.

If a run is resumed (`train --resume`), `trace.h5` covers all attempts, and each step appears once:
the steps before the checkpoint come from the previous attempt, the later ones from the new
attempt. Call numbers and times continue. If the host was rebooted or replaced, the times of the
new attempt are shifted by the elapsed wall-clock time.

The files `trace-1.h5`, `trace-2.h5` and so on contain the trace at the end of each earlier
attempt, including the steps that were repeated later. The trace of an attempt with another layout
is a separate file, and the attribute `other_layout` names the file of the previous attempt.

## Attributes of the root
"""

_TABLES = """\
## Tables

Types are NumPy types. The unit *row of /table* marks an index into another table.
"""

_ENUMERATIONS = """\
## Enumerations

Each number is the stored value for the name that follows it.
"""

_RELATIONS = """\
## How to interpret rows

`hpc3d.trace.checks_per_rank.violations(trace)` tests the invariants of this section. It returns
one line for each violated invariant, with the number of rows and the first one.

### Time of a rank

On one `stream` of a rank, two rows overlap only if one encloses the other. The `parent` of the
inner row is then the row of the outer one. The durations of a step's rows without a parent
therefore add up to at most the step time. The remaining time is unrecorded.

### Streams on a GPU

A rank on a GPU has seven streams. Its compute rows are timed on the device, not on the host that
launches the kernels:

* **Stream 0** is the host: input, checkpoints, and collectives of all ranks on host memory.
* **Stream 1** is the computation. A row of category `comm` is the time during which a call blocks
  the computation.
* **Stream 2** contains the execution of calls, with category `copy` and `seq` -1. Grouped messages
  are one row.
* **Stream 3** contains the calls along d, which have a separate queue.
* **Stream 4** contains copies of offloaded arrays to and from the host, with category `copy` and
  their bytes.
* **Stream 5** contains the calls along r, between groups of replicas or between workers.
* **Stream 6** contains the calls along e, which have a separate queue.

Streams run concurrently, so their times must not be added. The time of a rank is the time of
stream 1, and of stream 0 when stream 1 is idle. Rows of other streams may extend beyond the end of
their step. A row begins when the device reaches it; if the host is late, the row includes a part
of the wait for the host. `forward_s` and `backward_s` of a step count the rows of stream 1 in
these phases.

The times come from CUDA events, whose resolution is 0.5 us. They are read without synchronizing
the host within a step. At the beginning and end of each step, while the device is idle, a
reference event is recorded between two readings of the host's clock. The row `clock of the device`
spans these two readings. All times of a step may therefore have a common error of up to half of
the duration of this row. For a replayed CUDA graph, only the total time is known.

### Calls

A call posts a collective, a send or a receive, and the rank waits for it later. A row of category
`comm` is this wait: `t_start` is the start of the wait, and `posted` the time of the call.

* If the rank did other work in between, the call itself is a row of category `copy` with `seq` -1
  and no bytes. The rank could compute between the two rows while the data was in flight.
* If the rank waited immediately, a single row spans both, and `posted` equals `t_start`.
* A broadcast also waits when it is called, because the size of the block is sent first. Its row of
  category `copy` may therefore be long.

Ranks also record the categories `compute`, `optimizer` (the gradient norm and the update) and, on
the rank that reads the data, `io`.

### Copies of offloaded arrays

A copy of an offloaded array is a row of category `copy` without a group, named `offload` or
`fetch`, with its `bytes`. On a CPU, the rank does nothing else during the copy. On a GPU, the
copy is a row of stream 4, and the time that stream 1 waits for it is a row of category `wait`.

### Groups

A group contains the ranks that communicate along one mesh axis. It is a row of `/groups`: its
members are the `size` entries of `/groups/members` that start at `offset`.

`seq` numbers the collectives of a group. All rows of category `comm` with the same `group` and
`seq` belong to one collective, one row per member. Messages are numbered separately for each pair
of sender and receiver: `group`, sender, receiver and `seq` identify the two rows of one message.
The row of the sender is a `send` with the receiver as its `peer`, and vice versa for `recv`. Rows
are never matched by name or time.

### Bytes

The bytes of a collective are the bytes that the rank must receive with a bandwidth-optimal
algorithm, regardless of the algorithm used by the library. In a group of g ranks:

| op | bytes |
|---|---|
| all_gather, reduce_scatter, all_to_all | (1-1/g) of the gathered size |
| all_reduce | 2 (1-1/g) of the block |
| broadcast | the block; 0 at the root |
| reduce | the block; 0 at the member after the root |
| send, recv | the block |

The chain of a reduction begins at the member after the root, so this member receives nothing. The
received bytes of a rank are the bytes of category `comm`, excluding sends.

### Clocks

`t_start` and `posted` are unmodified readings of the host's monotonic clock in nanoseconds.
`t_global` is `t_start` on the clock of rank 0, computed with `/clock/model`. This model is fitted
to the exchanges in `/clock/samples`; the ranks of a host share a clock and a model. To compare
`posted` between ranks, add `t_global - t_start`. Steps only have raw times. The residual of the
model and the round trips of the samples bound the accuracy of comparisons between hosts.

### Experts

Each token is counted on exactly one of the ranks that route it. The sum of `/experts` over ranks
and experts is therefore the number of routed tokens of a step and layer, over all microbatches.
The sum of `/routers` is the contribution of the routers to the summed loss of the step. Recomputed
forward passes, evaluations and simulated runs are not counted.

Dispatch and combine are the all_to_all calls of groups along e. In a layer's forward pass, the
dispatch is first; in its backward pass, the combine is first.

### Memory

Each row contains the bytes of one kind of memory: the allocated bytes at the end of a step, and
the peak during the step. Different kinds may reach their peaks at different times. The peak of the
kind `all` is the largest total at any time. It is at most the sum of the peaks, and it decides
whether a run fits in memory. Older traces lack this kind.

### Predictions

Each predicted quantity is a row, with -1 in the columns that do not apply. For example, the
predicted step time is the row with the quantity `step_s` and -1 as step, stage and rank.

## How to read a trace

In Python, columns are read on access. A damaged or malicious file raises a ValueError with a
one-line explanation:

```python
import hpc3d.trace

with hpc3d.trace.open("results/RUN") as trace:  # or its trace.h5
    duration = trace.events["dur"]  # full column as a NumPy array
    mine = trace.events["dur", trace.rows(3)]  # rows of rank 3
    names = [trace.strings[i] for i in trace.events["name"]]
    trace.groups[0]  # Group(axis="x", members=(0, 1))
    trace.attrs["complete"], trace.attrs["missing"]
    [*trace.calibration]  # (op, axis) of calls timed in isolation
    {call: table.attrs["beta"] for call, table in trace.calibration.items()}  # s/B
```

In pandas, with names instead of codes:

```python
    events = trace.events.frame(["rank", "step", "category", "op", "group", "dur", "bytes"])
    events["axis"] = events["group"].map(lambda i: trace.groups[i].axis if i >= 0 else "")
    events.groupby(["category", "op", "axis"], observed=True)[["dur", "bytes"]].sum()
```

From the shell, with the HDF5 tools:

```sh
h5ls -r trace.h5              # list all tables
h5dump -A trace.h5            # every table and column with its unit and description
h5ls -v -d trace.h5/steps     # one table: types, units, descriptions and values
```

The durations of the matrix products of rank 3, read with h5py only:

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
    """Return the text of docs/trace.md."""
    parts = [_HEAD, _attributes(), _TABLES, *map(_section, [*LAYOUT][1:]), _ENUMERATIONS]
    return "\n".join([*parts, *map(_enumeration, ENUMS), _RELATIONS])


def _attributes():
    rows = [
        (f"`{each.name}`", each.type.__name__, each.description, "yes" if each.required else "")
        for each in ATTRIBUTES
    ]
    return _table(("attribute", "type", "meaning", "required"), rows)


def _section(path):
    """Return the Markdown section of a table or group: heading, description and columns."""
    table = LAYOUT[path]
    rows = [(f"`{c.name}`", c.type, _unit(c), c.description) for c in table.columns]
    columns = ["", _table(("column", "type", "unit", "meaning"), rows)] if rows else [""]
    return "\n".join([f"### `/{path}`", "", table.description, *columns])


def _unit(column):
    """Return the unit of a column or, for an index, the table to which the index refers."""
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
