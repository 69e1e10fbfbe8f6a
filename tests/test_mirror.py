"""Each module has a test file, or tests/README.md names the tests of the module."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "hpc3d"
LINE = re.compile(r"^\| `([\w/]+\.py)` \| ((?:`[\w/]+\.py`(?:, )?)+) \|", re.MULTILINE)
MOST = 40  # modules whose tests have another name


def mapped():
    """Return {module: its tests} of the page."""
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    return {module: re.findall(r"`(.+?)`", tests) for module, tests in LINE.findall(page)}


def without_a_test_of_their_name():
    names = {path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")}
    modules = [path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    return {path.relative_to(PACKAGE).as_posix() for path in modules if path.stem not in names}


def test_mapping_page_lists_every_module_without_a_test_of_its_name():
    assert mapped().keys() == without_a_test_of_their_name()


def test_mapping_page_names_existing_tests():
    assert not [
        name for tests in mapped().values() for name in tests if not (TESTS / name).is_file()
    ]


def test_modules_without_a_test_of_their_name_are_few():
    assert len(without_a_test_of_their_name()) <= MOST
