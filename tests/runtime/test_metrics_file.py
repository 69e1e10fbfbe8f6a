"""The file metrics.jsonl: complete lines, resumed runs, and metrics hooks."""

import json
import sys

import pytest

from hpc3d.runtime.metrics_file import NAME, MetricsFile, MetricsReader, read, sinks_of
from hpc3d.train import read_command_line


def steps(folder, numbers, start=0, sinks=()):
    said = []
    metrics = MetricsFile(folder, start, sinks, said.append)
    for number in numbers:
        metrics.write(step=number, loss=5.0 - number, gradient_norm=float("inf"))
    metrics.file.close()
    return said


def test_each_record_is_a_line_of_json(tmp_path):
    steps(tmp_path, range(3))
    lines = (tmp_path / NAME).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records == read(tmp_path)
    assert [record["loss"] for record in records] == [5, 4, 3]
    assert all(record["gradient_norm"] is None and record["time"] > 1e9 for record in records)


def test_resumed_run_rewinds_its_metrics(tmp_path):
    steps(tmp_path, range(5))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 2, "validation_loss": 1.5}\n{"step": 4, "validation_loss": 1.0}\n')
        file.write('{"step": 5, "lo')  # the run was killed
    assert len(read(tmp_path)) == 7
    steps(tmp_path, [3, 4], start=3)
    records = read(tmp_path)
    assert [record["step"] for record in records if "loss" in record] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in records if "validation_loss" in record] == [2]


def test_folder_without_metrics_yields_an_empty_list(tmp_path):
    assert read(tmp_path) == []


def test_reader_returns_new_complete_lines_only(tmp_path):
    reader, path = MetricsReader(tmp_path), tmp_path / NAME
    assert reader.more() == (True, [])
    path.write_text('{"step": 0, "loss": 5}\n{"st')
    assert reader.more() == (True, [{"step": 0, "loss": 5}])
    assert reader.more() == (False, [])
    with path.open("a") as file:
        file.write('ep": 1, "loss": 4}\nno record\n[1]\n{"step": "x"}\n\xff\n')
    assert reader.more() == (False, [{"step": 1, "loss": 4}])
    steps(tmp_path, [1], start=1)  # the run goes on from there
    anew, records = reader.more()
    assert anew and [record["step"] for record in records] == [0, 1]


def test_full_disk_error_names_the_metrics_file(tmp_path):
    (tmp_path / NAME).symlink_to("/dev/full")
    metrics = MetricsFile.__new__(MetricsFile)
    metrics.path, metrics.sinks = tmp_path / NAME, []
    metrics.file = metrics.path.open("a")
    with pytest.raises(OSError, match="No space left") as caught:
        metrics.write(step=0)
    assert caught.value.filename == str(tmp_path / NAME)
    with pytest.raises(OSError, match="No space left"):
        metrics.file.close()


def test_failing_sink_is_reported_once_and_the_run_continues(tmp_path):
    seen = []

    def bad(record):
        seen.append(record["step"])
        raise KeyError("nothing")

    said = steps(tmp_path, range(3), sinks=[bad])
    assert seen == [0] and len(said) == 1 and "KeyError" in said[0]
    assert len(read(tmp_path)) == 3


def test_metrics_hook_receives_every_record(tmp_path, monkeypatch):
    (tmp_path / "my_metrics.py").write_text("got = []\ndef take(record): got.append(record)\n")
    monkeypatch.chdir(tmp_path)  # also for `hpc3d`, which does not look here by itself
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    steps(tmp_path, range(2), sinks=sinks_of("my_metrics:take", trackers=()))
    assert [record["step"] for record in sys.modules["my_metrics"].got] == [0, 1]


@pytest.mark.parametrize("hook", ["nowhere:take", "json:nothing", "json:__doc__", "json", ":"])
def test_invalid_metrics_hook_is_rejected(hook):
    with pytest.raises(ValueError, match=r"^run\.metrics_hook = "):
        sinks_of(hook, trackers=())


def test_train_rejects_an_invalid_hook_before_it_starts():
    with pytest.raises(ValueError, match=r"^run\.metrics_hook = 'nowhere:take': Mod"):
        read_command_line(1, ["--run.metrics_hook", "nowhere:take"])


def test_tensorboard_receives_every_finite_scalar(tmp_path):
    pytest.importorskip("tensorboardX", reason="extra tensorboard")
    sinks = sinks_of(None, ["tensorboard"], tmp_path)
    steps(tmp_path, range(3), sinks=sinks)
    sinks[0].close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.read_bytes().count(b"loss") == 3
    assert b"gradient_norm" not in file.read_bytes()  # it is infinite in each
