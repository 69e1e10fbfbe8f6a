"""The files of PyTorch's profiler, a rank each, which Holistic Trace Analysis reads.

    TraceAnalysis(trace_dir="hta").get_comm_comp_overlap()

An event is a kernel on a stream of its rank's device: computation on stream 7, calls on a stream
for each mesh axis, from where they were posted to where they ended, for this is how long a kernel
of NCCL lasts.  What launched a kernel tells which step it belongs to.  Times are whole
microseconds, rounded down, so that what does not overlap in the trace does not overlap here.  What
the host of a device does is not on the device; copies of what is offloaded are on a stream of
their own; the calls as they run are not there a second time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.analyze.export.perfetto import records
from hpc3d.trace.schema import STREAM

if TYPE_CHECKING:
    from hpc3d.analyze.export.events import Events

COMPUTE, _COPIES, _CALLS = 7, 8, 20  # the streams of computation and of copies; the first of calls
_HOST = 1  # process and thread of the launches and steps
_ON_HOST, _COMMUNICATION, _OFFLOAD = map(STREAM.index, ("host", "communication", "offload"))


def write(events: Events, folder: Path) -> Path:
    """Write the folder hta and return its path."""
    path = folder / "hta"
    path.mkdir(parents=True, exist_ok=True)
    for rank, rows in enumerate(events.rows):
        # The first "rank" in the file tells Holistic Trace Analysis whose it is.
        about = {"backend": "nccl", "rank": rank, "world_size": len(events.rows)}
        head = {"schemaVersion": 1, "distributedInfo": about}
        with (path / f"rank-{rank:05d}.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            for number, line in enumerate(_lines(events, rank, rows)):
                file.write(("," if number else "") + json.dumps(line) + "\n")
            file.write("]}\n")
    return path


def _lines(events, rank, rows):
    for owner, step, begin, end in events.steps:
        if owner == rank:
            yield _complete(
                f"ProfilerStep#{step}", "user_annotation", begin, end, _HOST, _HOST, {}
            )
    on_device = events.columns["stream"][rows].any()
    for number, row in enumerate(records(events, rows), 1):
        if on_device and row["stream"] == _ON_HOST:
            name, times = events.names["name"].get(row["name"], ""), (row["start"], row["end"])
            yield _complete(name, "cpu_op", *times, _HOST, _HOST, {"External id": number})
        elif row["stream"] < _COMMUNICATION or row["stream"] == _OFFLOAD:
            yield from _launched(events, row, number)


def _launched(events, row, number):
    """A kernel, and what launched it."""
    launch, of_step = {"correlation": number}, {"External id": number}
    when = row["posted"], row["posted"]
    yield _complete("cudaLaunchKernel", "cuda_runtime", *when, _HOST, _HOST, launch | of_step)
    yield _kernel(events, row, launch | of_step)


def _complete(name, category, begin, end, process, thread, values):
    times = {"ts": begin // 1000, "dur": end // 1000 - begin // 1000}
    place = {"pid": process, "tid": thread}
    return {"ph": "X", "cat": category, "name": name, **times, **place, "args": values}


def _kernel(events, row, values):
    names = {key: names.get(row[key], "") for key, names in events.names.items()}
    if row["group"] < 0 or row["seq"] < 0:
        # Holistic Trace Analysis takes for a copy what is called Memcpy.
        copies = row["stream"] == _OFFLOAD
        stream, kind = (_COPIES, "gpu_memcpy") if copies else (COMPUTE, "kernel")
        name = f"Memcpy {names['name']}" if copies else names["name"]
        values = values | {"device": 0, "stream": stream}
        return _complete(name, kind, row["start"], row["end"], 0, stream, values)
    stream = _CALLS + row["axis"]
    group = events.groups[row["group"]]
    values = values | {
        "device": 0,
        "stream": stream,
        "Collective name": names["op"],
        "In msg nelems": row["count"],
        "Group size": len(group.members),
        "dtype": names["dtype"],
        "Process Group Name": str(row["group"]),
        "Process Group Description": f"mesh axis {group.axis}",
        "Process Group Ranks": str(list(group.members)),
        "Rank": row["rank"],
        "Seq": row["seq"],
    }
    name = f"ncclKernel_{names['op']}_{names['axis']}"
    return _complete(name, "kernel", row["posted"], row["end"], 0, stream, values)
