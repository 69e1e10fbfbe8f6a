"""Export formats: which events are exported, and the output of the command."""

import shutil

import numpy as np
import pytest

from hpc3d import report
from hpc3d.analyze.export.formats import export
from tests.analyze.export.exported import exported


def test_export_contains_only_the_requested_steps(real, tmp_path):
    steps = real.events["step"]
    for first, last in ((1, 1), (1, None), (0, 1)):
        events = exported(real, first=first, last=last)
        upper = steps.max() if last is None else last
        assert len(events.columns["rank"]) == ((steps >= first) & (steps <= upper)).sum()
        assert {step for _, step, *_ in events.steps} == set(range(first, upper + 1))
        assert events.columns["start"].min() == 0 <= events.links.min()
        assert np.all(events.columns["step"][events.links[:, 0]] >= first)
    with pytest.raises(ValueError, match=r"steps 7 to the last one; the trace has steps 0 to \d$"):
        exported(real, first=7)


def test_report_writes_the_formats_given_by_export(real, tmp_path, capsys):
    path, out = str(real.path), tmp_path / "out"
    words = ["--tables", "--out", str(out), "--steps", "1:1", "--export"]
    assert report.main([path, *words, "perfetto,hta"]) == 0
    assert {each.name for each in (out / "exports").iterdir()} == {"perfetto.json", "hta"}
    twin = shutil.copy(path, tmp_path / "twin.h5")
    assert report.main([path, str(twin), *words, "pipit"]) == 0
    assert (out / "exports" / "2" / "pipit.csv").exists()
    for wrong, why in (("otf", "otf: must be one of perfetto, pipit, hta, otf2"),):
        with pytest.raises(SystemExit):
            report.main([path, *words, wrong])
        assert why in capsys.readouterr().err


def test_steps_option_accepts_a_single_step_and_open_ranges(real, tmp_path):
    texts = {}
    for steps in ("1", "1:1", "1:", ":1"):
        out = tmp_path / steps.replace(":", "-")
        words = ["--tables", "--out", str(out), "--steps", steps, "--export", "pipit"]
        assert report.main([str(real.path), *words]) == 0
        texts[steps] = (out / "exports" / "pipit.csv").read_bytes()
    assert texts["1"] == texts["1:1"]
    assert len(set(texts.values())) == 3


def test_export_returns_the_paths_of_written_files(hand, tmp_path):
    paths = export(["pipit", "hta"], exported(hand), tmp_path / "new")
    assert [path.name for path in paths] == ["pipit.csv", "hta"]
    assert all(path.exists() for path in paths)
