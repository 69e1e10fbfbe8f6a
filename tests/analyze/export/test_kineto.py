"""Export to Kineto files, which Holistic Trace Analysis reads."""

import json
import re
from itertools import pairwise

from hpc3d.analyze.export import kineto
from tests.analyze.export.exported import exported
from tests.analyze.small import GROUPS, ROWS, small
from tests.analyze.synthetic import by_hand, call, row


def profiles(trace, folder):
    path = kineto.write(exported(trace), folder)
    return [json.loads(each.read_text()) for each in sorted(path.iterdir())]


def test_kineto_files_state_the_rank_before_the_events(trace, tmp_path):
    path = kineto.write(exported(trace), tmp_path)
    for rank, each in enumerate(sorted(path.iterdir())):
        text = each.read_text()
        assert re.search(r'"rank":\s+(\d+)', text)[1] == str(rank)
        assert json.loads(text)["distributedInfo"]["world_size"] == trace.attrs["world_size"]


def test_kineto_kernels_are_launched_in_steps_and_do_not_overlap(trace, tmp_path):
    for rank, profile in enumerate(profiles(trace, tmp_path)):
        lines = profile["traceEvents"]
        assert lines[0]["name"].startswith("ProfilerStep#"), "no launch may be the first line"
        for line in lines:
            assert {"ph", "cat", "name", "ts", "dur", "pid", "tid", "args"} == line.keys()
            assert isinstance(line["ts"], int) and isinstance(line["dur"], int)
            assert line["dur"] >= 0
        kernels = [line for line in lines if line["cat"] == "kernel"]
        launches = [line for line in lines if line["cat"] == "cuda_runtime"]
        numbers = [[line["args"]["correlation"] for line in each] for each in (kernels, launches)]
        assert numbers[0] == numbers[1] == [*range(1, len(kernels) + 1)]
        assert len(kernels) == (trace.events["rank"] == rank).sum()
        assert all(line["tid"] == line["args"]["stream"] > 0 for line in kernels)
        compute = [line for line in kernels if line["tid"] == kineto.COMPUTE]
        for line, following in pairwise(compute):
            assert line["ts"] + line["dur"] <= following["ts"]


def test_kineto_times_are_rounded_down(tmp_path):
    rows = [row(0, 0, 1.0006), row(0, 1.0006, 1.0008), row(0, 1.0008, 3)]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 3)}) as trace:
        lines = profiles(trace, tmp_path)[0]["traceEvents"]
    found = [(line["ts"], line["dur"]) for line in lines if line["cat"] == "kernel"]
    assert found == [(0, 1000), (1000, 0), (1000, 2000)]


def test_kineto_collectives_last_from_their_posting_to_their_end(tmp_path):
    rows = [*ROWS[:3], *ROWS[3:], call(0, "all_reduce", 9.2, 9.5, seq=1, posted=1.5, count=7)]
    with small(tmp_path / "trace.h5", rows) as trace:
        lines = profiles(trace, tmp_path)[0]["traceEvents"]
    found = next(
        line for line in lines if "all_reduce" in line["name"] and line["cat"] == "kernel"
    )
    assert (found["ts"], found["dur"]) == (1500, 8000)
    assert re.match("^nccl.*Kernel", found["name"])
    args = found["args"]
    assert (args["Collective name"], args["Group size"], args["Rank"]) == ("all_reduce", 2, 0)
    assert (args["In msg nelems"], args["dtype"]) == (7, "float32")
    assert args["Process Group Ranks"] == str([*GROUPS[0][1]])


def test_kineto_puts_offload_copies_on_a_separate_stream(tmp_path):
    """Concurrent computation and running calls are on other streams."""
    rows = [
        row(0, 0, 4, stream=1),
        row(0, 1, 3, "copy", op="none", stream=4),
        row(0, 2, 5, "copy", op="none", stream=2),
    ]
    with by_hand(tmp_path / "trace.h5", rows, {(0, 0): (0, 5)}) as trace:
        lines = profiles(trace, tmp_path)[0]["traceEvents"]
    found = {(line["cat"], line["tid"], line["ts"]) for line in lines if "stream" in line["args"]}
    assert found == {("kernel", kineto.COMPUTE, 0), ("gpu_memcpy", 8, 1000)}
    assert any(line["name"].startswith("Memcpy") for line in lines)
