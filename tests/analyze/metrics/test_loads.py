"""What runs differ in is said before they are compared."""

from types import SimpleNamespace

import h5py

from hpc3d.analyze.metrics.loads import differing_keys
from hpc3d.trace.merge import merge
from tests.analyze.report.by_hand import reported, write_run


def test_what_runs_differ_in_is_said_before_they_are_compared(tmp_path, capsys):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", scheme="1d")
    assert reported(capsys, one, other)["notes"] == []
    merge(one), merge(other)
    with h5py.File(other / "trace.h5", "r+") as file:
        file.attrs["config"] += '[train]\nbatch = 96\ndtype = "float64"\n[data]\npath = "mine"\n'
        file.attrs["cores"] = 3
        file["steps/tokens"][:] = 900
    with h5py.File(one / "trace.h5", "r+") as file:
        file.attrs["cores"] = 4
    found = reported(capsys, one, other, "--out", tmp_path / "out")
    three, flat = "3d along m n, x=2 y=2", "1d, x=2 y=2"
    assert found["notes"] == [
        f"train.batch differs: 192 in {three}; 96 in {flat}",
        f"train.dtype differs: float32 in {three}; float64 in {flat}",
        f"tokens a step differs: 1,800 in {three}; 900 in {flat}",
        f"data.path differs: inputs/corpus in {three}; mine in {flat}",
        f"{flat}: cores: 3 for 4 ranks a host: they take turns, so times are longer than on a"
        " core each",
    ]
    assert [row["speedup"] for row in found["scaling"]] == [1, None]
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"Before these runs are compared:\n\n* {found['notes'][0]}\n" in text


def test_every_other_key_that_differs_is_told():
    texts = {
        "one": "[mesh]\nx = 2\n",
        "two": '[mesh]\nx = 2\nd = 2\n[parallel]\nkeep_dtype = "int8"\nzero = 1\n'
        '[run]\nout = "a"\n',
    }
    traces = [SimpleNamespace(attrs={"config": text}) for text in texts.values()]
    assert differing_keys(traces, [*texts]) == [
        "mesh.d differs: 1 in one; 2 in two",
        "parallel.zero differs: 0 in one; 1 in two",
        'parallel.keep_dtype differs: absent in one; "int8" in two',
    ]
    assert differing_keys(traces[:1], ["one"]) == []
    unknown = SimpleNamespace(attrs={"config": ""})
    assert differing_keys([traces[0], unknown], [*texts]) == []
