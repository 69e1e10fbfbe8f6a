"""docs/layouts.md and its pictures are those that docs/figures/layouts.py writes."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

from tests.mpi import ROOT

COMMAND = "run: python docs/figures/layouts.py"


def files():
    spec = spec_from_file_location("layouts_of_docs", ROOT / "docs" / "figures" / "layouts.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


def test_page_and_pictures_are_up_to_date():
    found = files()
    assert len(found) == 9
    for path, text in found.items():
        assert (ROOT / "docs" / path).read_text(encoding="utf-8") == text, COMMAND


def test_no_picture_is_left_over():
    pictures = {f"figures/{path.name}" for path in (ROOT / "docs/figures").glob("layout-*.svg")}
    assert pictures == files().keys() - {"layouts.md"}
