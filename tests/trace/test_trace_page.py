"""docs/trace.md matches the definitions, and its examples run."""

import re
from pathlib import Path

import pytest

from hpc3d.trace import schema
from hpc3d.trace.annotations import write_calibration
from hpc3d.trace.merge import merge
from hpc3d.trace.trace_page import page
from tests.trace.small import expected_events, write_all
from tests.trace.test_annotations import MEASURED

FILE = Path(__file__).parents[2] / "docs" / "trace.md"


def test_trace_page_is_up_to_date():
    assert FILE.read_text(encoding="utf-8") == page(), (
        "python -m hpc3d.trace.trace_page > docs/trace.md"
    )


def test_trace_page_lists_every_definition():
    text = page()
    for table, (description, columns) in schema.LAYOUT.items():
        assert table == "/" or f"### `/{table}`\n\n{description}\n" in text
        for column in columns:
            assert f"| `{column.name}` |" in text and column.description in text
    for attribute in schema.ATTRIBUTES:
        assert f"| `{attribute.name}` |" in text
    for names in schema.ENUMS.values():
        assert ", ".join(f"{code} {name}" for code, name in enumerate(names)) in text


@pytest.fixture
def run(tmp_path, monkeypatch):
    path = merge(write_all(tmp_path / "results" / "RUN"))
    write_calibration(path, MEASURED)
    monkeypatch.chdir(tmp_path)
    return path.parent


def example(first):
    """Run the block of the page that begins with `first`, and the next one if it is indented."""
    blocks = re.findall(r"```python\n(.*?)```", page(), re.DOTALL)
    start = next(number for number, block in enumerate(blocks) if block.startswith(first))
    rest = [block for block in blocks[start + 1 : start + 2] if block.startswith(" ")]
    defined = {}
    exec("".join([blocks[start], *rest]), defined)
    return defined


def test_numpy_and_pandas_example_runs(run):
    defined = example("import hpc3d.trace")
    expected = expected_events()
    assert defined["duration"].tolist() == [row["dur"] for row in expected]
    assert defined["mine"].tolist() == [row["dur"] for row in expected if row["rank"] == 3]
    assert defined["names"] == [row["name"] for row in expected]
    assert defined["events"]["axis"].value_counts().to_dict() == {"": 16, "x": 16, "y": 16}


def test_h5py_example_runs(run, monkeypatch):
    monkeypatch.chdir(run)
    gemms = [
        r["dur"] for r in expected_events() if r["rank"] == 3 and schema.OP[r["op"]] == "gemm"
    ]
    assert example("import h5py")["gemms"].tolist() == gemms
