"""A run whose numbers were worked out by hand."""

from tests.analyze.report.conftest import run  # noqa: F401
