"""Damaged heaps, in which the HDF5 library would loop forever."""

import h5py
import pytest

from hpc3d.trace.heaps import check_heaps

MARK = b"GCOL\x01\0\0\0"


@pytest.fixture
def path(tmp_path):
    """File with texts of many lengths."""
    path = tmp_path / "texts.h5"
    with h5py.File(path, "w") as file:
        file["texts"] = ["x" * number for number in range(300)]
        file.attrs["one"] = "text"
    assert MARK in path.read_bytes()
    return path


def damaged(path, place, new):
    data = bytearray(path.read_bytes())
    data[place : place + len(new)] = new
    path.write_bytes(data)


def test_valid_heaps_pass(path):
    check_heaps(path)


@pytest.mark.parametrize("what", ["size of the heap", "size of an object", "free space"])
def test_heap_sizes_out_of_range_are_rejected(path, what):
    data = path.read_bytes()
    heap = data.index(MARK)
    place = heap + {"size of the heap": 8, "size of an object": 24, "free space": 24}[what]
    if what == "free space":
        while int.from_bytes(data[place - 8 : place - 6], "little"):
            place += 16 + -(-int.from_bytes(data[place : place + 8], "little") // 8) * 8
    damaged(path, place, b"\xff" * 8)
    with pytest.raises(ValueError, match=f"the strings at byte {heap} are damaged"):
        check_heaps(path)


def test_heap_marker_at_the_end_of_the_file_is_rejected(tmp_path):
    path = tmp_path / "end"
    path.write_bytes(b"rows" + MARK)
    with pytest.raises(ValueError, match="byte 4"):
        check_heaps(path)
    path.write_bytes(b"")
    check_heaps(path)
