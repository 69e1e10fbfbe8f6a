"""Reading and writing of small files. Devices, pipes, folders, large files, and texts that take
long to parse are rejected. A written file is complete or absent, and no temporary file remains."""

import os
import platform
import re
import subprocess
import sys
import tomllib

import pytest

from hpc3d.console import small_files


def refusal(path, *how):
    with pytest.raises(ValueError) as caught:
        small_files.read(path, *how)
    (line,) = str(caught.value).splitlines()
    return line


def test_only_small_regular_files_are_read(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    text = tmp_path / "text"
    text.write_bytes(b"12345")
    assert small_files.read(text, 5) == b"12345"
    assert " 4 bytes" in refusal(text, 4)
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (pipe, "/dev/zero", tmp_path / "link"):
        assert re.match(f"{path} .*regular file", refusal(path))
    assert f"{tmp_path} " in refusal(tmp_path)
    assert "No such file or directory; name one" in refusal(tmp_path / "none", 1, "name one")
    assert "File name too long" in refusal("a" * 5000)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 500_000 + "a = 1",
        "[" + "a." * 500_000 + "a]",
        "x = {b = 1, " + "a." * 500_000 + "a = 1}",
        "x = " + "[" * 500_000,
        "x = 1\n" * 200_000,
    ],
)
def test_hostile_toml_is_rejected_quickly(text, monkeypatch):
    """Keys of many parts are not parsed, because parsing takes quadratic time."""
    parse, parsed = tomllib._parser.parse_key_part, []

    def parse_key_part(*arguments):
        parsed.append(arguments)
        assert len(parsed) < 10
        return parse(*arguments)

    monkeypatch.setattr(tomllib._parser, "parse_key_part", parse_key_part)
    with pytest.raises(ValueError):
        small_files.toml(text)


def test_deep_and_long_toml_is_read_within_its_limits():
    deep = ".".join("a" * (small_files.MOST_PARTS + 1))
    numbers = ", ".join(["0.5"] * 1000)
    assert small_files.toml(f"{deep} = 1\nx = [{numbers}]")["x"] == [0.5] * 1000
    with pytest.raises(ValueError, match=" 100 components"):
        small_files.toml(f"a.{deep} = 1")
    with pytest.raises(ValueError, match=r"1048577 .* 1048576"):
        small_files.toml("#" * 1048577)


def test_a_broken_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), small_files.replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from hpc3d.console.small_files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "trace.h5"
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    (left,) = tmp_path.iterdir()
    with small_files.replacing(path, crowded=True) as temporary:
        temporary.write_text("of a rank")
    assert left.exists()
    with small_files.replacing(path) as temporary:
        temporary.write_text("whole")
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "whole"


def test_temporary_files_of_others_stay(tmp_path):
    """Files of a running process, of another host, and files with similar names stay. After a day,
    a process of another host is assumed to have ended."""
    here, path = platform.node(), tmp_path / "file"
    other = "another.host"
    names = [f"file.{here}.{os.getppid()}.tmp", f"file.{other}.1.tmp", "file.7.tmp"]
    names += [f"file2.{here}.{2**22 + 1}.tmp", f"file.{here}.mine.tmp", f"file.{here}.tmp"]
    for name in names:
        (tmp_path / name).touch()
    old, dead = tmp_path / f"file.{other}.2.tmp", tmp_path / f"file.{here}.{2**22 + 1}.tmp"
    old.touch()
    os.utime(old, (0, 0))
    (dead / "below").mkdir(parents=True)
    assert small_files.temporary_of(path).name == f"file.{here}.{os.getpid()}.tmp"
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names)


def test_devices_and_pipes_are_not_replaced(tmp_path):
    """Otherwise, `-o /dev/null` would replace the device if the user is root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with small_files.replacing(pipe) as path:
        path.write_text("plan")
    assert os.read(reader, 10) == b"plan" and pipe.is_fifo()
    assert [*tmp_path.iterdir()] == [pipe]
    os.close(reader)
