"""Rows as notebooks and pandas have them."""

import numpy as np

from hpc3d.library.records import Records

ROWS = Records([{"axis": "x", "bytes": 12345, "share": 0.123456, "fits": True, "wait_s": None}])


def test_a_notebook_shows_a_table():
    cells = ROWS._repr_html_().split("</td><td>")
    assert cells[1:4] == ["12,345", "0.1235", "yes"] and cells[4].startswith("</td></tr>")
    assert "<th>wait_s</th>" in cells[0]


def test_numbers_of_numpy_are_written_like_others():
    row = {"a": np.int64(1000), "b": np.float64(0.25)}
    assert "<td>1,000</td><td>0.25</td>" in Records([row])._repr_html_()


def test_text_of_others_is_escaped():
    assert "<b>" not in Records([{"<b>": "<b>"}])._repr_html_()


def test_many_rows_are_cut():
    assert Records([{"row": row} for row in range(42)])._repr_html_().endswith("2 more rows</p>")


def test_a_frame_has_the_columns():
    assert [*ROWS.frame().columns] == [*ROWS[0]]
