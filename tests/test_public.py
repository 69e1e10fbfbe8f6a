"""The public names of the package `hpc3d`."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpc3d

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", hpc3d.PUBLIC)
def test_public_name_exists_and_is_documented(name):
    assert getattr(hpc3d, name) is not None
    assert name in dir(hpc3d)
    assert re.search(rf"(^\.\. auto\w+:: |`)hpc3d\.{name}\b", PAGE, re.MULTILINE)


def test_type_checking_imports_match_the_public_names():
    tree = ast.parse(Path(hpc3d.__file__).read_text(encoding="utf-8"))
    told = {
        each.asname: f"{node.module}:{each.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("hpc3d.")
        for each in node.names
    }
    assert told == hpc3d.PUBLIC


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hpc3d.no_such_name


def test_importing_hpc3d_imports_nothing_else():
    code = "import sys, hpc3d; assert not {'numpy', 'mpi4py', 'hpc3d.tensor'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
