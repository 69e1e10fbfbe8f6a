"""Notebooks run without errors, print the expected values, and are stored without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import JOB_LOCK, surroundings

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def name_of(path):
    return path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_has_no_outputs_and_is_linked(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    for page in ("api.md", "tutorial.md"):
        assert f"(../notebooks/{path.name})" in (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_runs(path, tmp_path):
    environment = {**os.environ, **surroundings(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--execute", "--stdout"]
    with JOB_LOCK:
        done = subprocess.run(
            [*command, str(path)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    shown = {"cube": "3d     ", "pipeline": "![png](", "layouts": "<td>43520</td>"}
    assert shown[path.stem] in done.stdout
