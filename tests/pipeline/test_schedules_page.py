"""The page of diagrams matches the diagrams of the program."""

from pathlib import Path

from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.pipeline.schedules_page import page

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_diagram_page_is_up_to_date():
    text = DOCS.read_text(encoding="utf-8")
    assert text == page(), "run: python -m hpc3d.pipeline.schedules_page > docs/schedules.md"
    assert all(f"## {name}\n" in text for name in SCHEDULES)
