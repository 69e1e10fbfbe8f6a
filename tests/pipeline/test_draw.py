"""Diagrams of small schedules; docs/schedules.md contains the diagrams of all schedules."""

from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline

EQUAL = Cost(1, 1, 1)


def drawn(*sizes, cost=EQUAL, steps=1, **how):
    return draw(timeline(*instruction_streams(*sizes, steps=steps), cost), **how).splitlines()


def test_1f1b_diagram():
    assert drawn("1f1b", 2, 3) == [
        "0 |F0 F1       B0--- F2 B1---    B2---",
        "1 |   F0 B0--- F1 B1--- F2 B2---",
    ]


def test_lowercase_is_chunk_1_and_a_leading_number_a_later_chunk():
    assert drawn("zb-v", 2, 2, 2) == [
        "0 |F0 F1    f0 b0 w0 f1 b1 w1 B0 W0    B1 W1",
        "1 |   F0 f0 F1 f1 b0 w0 B0 W0 b1 w1 B1 W1",
    ]
    assert drawn("interleaved", 1, 1, 3) == ["0 |F0  f0  2F0 2B0---- b0----- B0-----"]


def test_vertical_bar_marks_an_update():
    assert drawn("pipedream", 2, 2, columns=30) == [
        "0 |F0 F1       B0---|   B1---|",
        "1 |   F0 B0---|F1 B1---|",
    ]
    assert drawn("pipedream", 2, 2, columns=29) == [
        "0 |F0 F1       B0---|   B1",
        "1 |   F0 B0---|F1 B1---|",
        "truncated after 8 of 9 cells of 1 s",
    ]


def test_wide_diagram_loses_its_gaps_and_is_then_truncated():
    assert drawn("zb-h1", 2, 3, columns=34) == [
        "0 |F0 F1    B0 W0 F2 B1 W1 B2 W2",
        "1 |   F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]
    assert drawn("zb-h1", 2, 3, columns=24) == [
        "0 |F0F1  B0W0F2B1W1B2W2",
        "1 |  F0B0F1B1W0F2B2W1W2",
    ]
    assert drawn("zb-h1", 2, 3, columns=14) == [
        "0 |F0F1  B0W0",
        "1 |  F0B0F1B1",
        "truncated after 5 of 10 cells of 1 s",
    ]


def test_diagram_fits_the_columns():
    for columns in (20, 50, 99):
        for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2), ("pipedream", 1)):
            lines = drawn(name, 4, 12, v, columns=columns, cost=Cost(1.1, 1.7, 0.9, 0.3))
            assert len(lines) == 5
            assert max(map(len, lines[:4])) <= columns
            assert max(map(len, lines[:4])) > columns - 6


def test_cell_width_is_the_shortest_pass():
    cost = Cost(0.02, 0.04, 0.02, comm=0.01)
    assert drawn("1f1b", 2, 1, cost=cost) == [
        "0 |F0                B0------",
        "1 |      F0 B0------",
    ]
    assert drawn("1f1b", 1, 1, cost=Cost(1, 2**-20, 0), columns=20)[1:] == [
        "truncated after 8 of 1048577 cells of 9.54e-07 s"
    ]
