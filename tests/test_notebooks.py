"""Every cell of the notebooks runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


def cells(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and all("id" in cell for cell in book["cells"])
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def source(path):
    return "\n\n".join("".join(cell["source"]) for cell in cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cube", "pipeline", "layouts"])
def test_a_notebook_runs(name, tmp_path):
    code = source(FOLDER / f"{name}.ipynb")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_notebooks_are_kept_without_what_they_printed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {"cube", "pipeline", "layouts"}
    for path in FOLDER.glob("*.ipynb"):
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells(path)), path
        compile(source(path), str(path), "exec")
