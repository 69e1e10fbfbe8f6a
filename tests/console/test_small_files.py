"""What is read is small and regular: a device, a pipe, a folder and a large file are refused, and
so is a text that would take long to be parsed."""

import os
import re
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
        assert re.match(f"{path} .*regular files", refusal(path))
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
def test_hostile_toml_is_refused_at_once(text, monkeypatch):
    """No key of many parts is parsed, which takes a time that goes with their square."""
    parse, parsed = tomllib._parser.parse_key_part, []

    def parse_key_part(*arguments):
        parsed.append(arguments)
        assert len(parsed) < 10
        return parse(*arguments)

    monkeypatch.setattr(tomllib._parser, "parse_key_part", parse_key_part)
    with pytest.raises(ValueError):
        small_files.toml(text)


def test_other_toml_is_read():
    deep = ".".join("a" * (small_files.MOST_PARTS + 1))
    numbers = ", ".join(["0.5"] * 1000)
    assert small_files.toml(f"{deep} = 1\nx = [{numbers}]")["x"] == [0.5] * 1000
    with pytest.raises(ValueError, match=" 100 parts"):
        small_files.toml(f"a.{deep} = 1")
    with pytest.raises(ValueError, match=r"1048577 .* 1048576"):
        small_files.toml("#" * 1048577)
