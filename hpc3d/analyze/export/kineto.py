"""Export of a run as PyTorch profiler traces, one file per rank, for Holistic Trace Analysis.

    TraceAnalysis(trace_dir="hta").get_comm_comp_overlap()

An event is written as a kernel on a stream of its rank's device. Computation is on stream 7, and
offload copies are on a separate stream. Communication calls are on one stream per mesh axis. Like
an NCCL kernel, a call extends from the time when it is posted to its end. A launch record assigns
each kernel to its training step. Times are rounded down to microseconds, so that events that do
not overlap in the trace do not overlap in the files. If a rank uses a device, its host work is
written as CPU operations. Events of communication streams are omitted, because they duplicate the
calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.analyze.export.perfetto import records, write_records
from hpc3d.trace.schema import STREAM

if TYPE_CHECKING:
    from hpc3d.analyze.export.events import Events

COMPUTE, _COPIES, _CALLS = 7, 8, 20  # stream IDs of computation, copies and the first mesh axis
_HOST = 1  # process ID and thread ID of kernel launches and training steps
_ON_HOST, _COMMUNICATION, _OFFLOAD = map(STREAM.index, ("host", "communication", "offload"))


def write(events: Events, folder: Path) -> Path:
    """Write the profiler files to the subfolder `hta`, and return its path."""
    path = folder / "hta"
    path.mkdir(parents=True, exist_ok=True)
    for rank, rows in enumerate(events.rows):
        # Holistic Trace Analysis reads the rank from the first "rank" key in a file.
        about = {"backend": "nccl", "rank": rank, "world_size": len(events.rows)}
        head = {"schemaVersion": 1, "distributedInfo": about}
        write_records(path / f"rank-{rank:05d}.json", head, _lines(events, rank, rows))
    return path


def _lines(events, rank, rows):
    for owner, step, begin, end in events.steps:
        if owner == rank:
            name = f"ProfilerStep#{step}"
            yield _complete(name, "user_annotation", begin, end, _HOST, _HOST, {})
    on_device = events.columns["stream"][rows].any()
    for number, row in enumerate(records(events, rows), 1):
        if on_device and row["stream"] == _ON_HOST:
            name, times = events.names["name"].get(row["name"], ""), (row["start"], row["end"])
            yield _complete(name, "cpu_op", *times, _HOST, _HOST, {"External id": number})
        elif row["stream"] < _COMMUNICATION or row["stream"] == _OFFLOAD:
            launch = {"correlation": number, "External id": number}
            when = row["posted"], row["posted"]
            yield _complete("cudaLaunchKernel", "cuda_runtime", *when, _HOST, _HOST, launch)
            yield _kernel(events, row, launch)


def _complete(name, category, begin, end, process, thread, values):
    times = {"ts": begin // 1000, "dur": end // 1000 - begin // 1000}
    lane = {"pid": process, "tid": thread}
    return {"ph": "X", "cat": category, "name": name, **times, **lane, "args": values}


def _kernel(events, row, values):
    names = {key: names.get(row[key], "") for key, names in events.names.items()}
    if row["group"] < 0 or row["seq"] < 0:
        # Holistic Trace Analysis identifies copies by the name Memcpy.
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
