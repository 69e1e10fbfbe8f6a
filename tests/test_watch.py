"""The command `watch`, which shows a run while it is running."""

import sys

import pytest

from hpc3d import watch


def test_watch_once_prints_the_newest_or_named_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert watch.main([]) == 2
    for name in ("old", "new"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "config.toml").touch()
    assert watch.main(["--once"]) == 0
    assert watch.main(["results/old", "--once"]) == 0
    assert watch.main(["results/none"]) == 2
    said = capsys.readouterr()
    assert said.out == "new   starting\nold   starting\n"
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["hpc3d.watch"] * 2


def test_watch_continues_until_the_run_has_ended(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").touch()
    monkeypatch.setattr(
        "time.sleep", lambda _: (tmp_path / "train.log").write_text("run kept in results/a\n")
    )
    assert watch.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["starting", "ended"]


def test_watch_redraws_the_screen_on_a_terminal(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").touch()
    (tmp_path / "train.log").write_text("run kept in results/a\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert watch.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"\x1b[H\x1b[K{tmp_path.name}   ended\n\x1b[J"


def test_watch_appends_a_line_only_on_changes_without_a_terminal(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.toml").touch()
    log, sleeps = tmp_path / "train.log", iter(range(5))
    monkeypatch.setattr(
        "time.sleep", lambda _: next(sleeps) == 4 and log.write_text("run kept in results/a\n")
    )
    assert watch.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{tmp_path.name}   {state}" for state in ("starting", "ended")]


@pytest.mark.parametrize("every", ["0", "x", "nan", "1e9"])
def test_watch_interval_must_be_a_number_of_seconds(every, capsys):
    with pytest.raises(SystemExit, match="2"):
        watch.main(["--every", every])
    assert "must be a number of seconds" in capsys.readouterr().err
