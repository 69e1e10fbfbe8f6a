"""Schedules in CSV files: read, written, and rejected with one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.pipeline.csv_schedule import from_csv, to_csv
from hpc3d.pipeline.instruction import Placement
from hpc3d.pipeline.schedule import SCHEDULES, find, instruction_streams

CELLS = st.sampled_from(["F0", "B0", "W0", "BW0", "F1", "B1", "1F0", "1B0", "F3"]) | st.text(
    max_size=4
)


@given(st.lists(st.lists(CELLS, max_size=6), max_size=3), st.sampled_from([",", ",,", " , "]))
def test_any_file_is_parsed_or_rejected_in_one_line(tmp_path_factory, rows, comma):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes("\n".join(comma.join(row) for row in rows).encode())
    try:
        table = from_csv(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and len(str(error).splitlines()) == 1
    else:
        assert table.micros and len(table.streams) == table.placement.stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h2", "zb-v"])
def test_schedule_round_trips_through_a_file(tmp_path, name):
    chunks = SCHEDULES[name].chunks or 2
    written, placement = instruction_streams(name, 3, 7, chunks)
    to_csv(tmp_path / "schedule.csv", written, placement)
    assert instruction_streams(f"csv:{tmp_path / 'schedule.csv'}", 3, 7, chunks) == (
        written,
        placement,
    )


def csv_file(folder, rows):
    (folder / "s.csv").write_text(rows, encoding="utf-8")
    return folder / "s.csv"


def test_blank_cells_ragged_rows_and_explicit_chunks(tmp_path):
    path = csv_file(tmp_path, "\ufeff0F0, F1,,BW0,B1\r\n\r\nF0,,,B0,F1,B1,,\r\n,,\r\n")
    table = from_csv(path)
    assert [" ".join(map(str, stream)) for stream in table.streams] == [
        "F0 F1 BW0 B1",
        "F0 B0 F1 B1",
    ]
    assert (table.placement, table.micros) == (Placement(2, 1), 2)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("", ".*row"),
        ("turn\n", ".*row"),
        ("F0,B0\nF0,B0,X1\n", "row 2, column 3: 'X1' "),
        ("F0,SendF0,B0\n", "row 1, column 2: SendF0 .* remove it"),
        ("F0,B0,Step\n", "row 1, column 3: Step .* remove it"),
        ("F0,B0\nF0,,B0,F0\n", "row 2, column 4: F0 .*twice"),
        ("F0,B0,BW0\n", "row 1, column 3: BW0 .*twice"),
        ("B0,F0\n", "row 1, column 1: B0 .*F0"),
        ("F0,W0,B0\n", "row 1, column 2: W0 .*B0"),
        ("F0,B0,F1,B1\nF0,B0,F1\n", "row 2: B1 is missing"),
        ("F0,B0,F2,B2\n", "row 1: F1 is missing"),
        ("F0,1F0,1B0,B0\nF0,B0\n", "row 2: 1F0 is missing"),
        ("turn\nF0,B0\n", 'row 1: .* "turn" .* 2 .* 1'),
    ],
)
def test_invalid_schedule_file_is_rejected(tmp_path, rows, fault):
    with pytest.raises(ValueError, match=rf"s\.csv: {fault}"):
        from_csv(csv_file(tmp_path, rows))


def test_unreadable_files_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv: No such file"):
        find(f"csv:{tmp_path / 'none.csv'}")
    (tmp_path / "binary.csv").write_bytes(b"F0,\xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.csv: .*CSV .*UTF-8"):
        find(f"csv:{tmp_path / 'binary.csv'}")


def test_file_schedule_has_fixed_sizes(tmp_path):
    found = find(f"csv:{csv_file(tmp_path, 'F0,B0,F1,B1' + chr(10))}")
    assert found.forbids(1, 2, 1) is None
    assert "mesh.p = 2: " in found.forbids(2, 2, 1)
    assert "parallel.microbatches = 3: " in found.forbids(1, 3, 1)
    assert "parallel.chunks = 2: " in found.forbids(1, 2, 2)
