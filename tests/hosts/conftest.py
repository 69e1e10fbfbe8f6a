"""Tests on emulated hosts are skipped, with the reason, where there can be none."""

import pytest

from tests.hosts.emulated import available


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if reason := available():
        pytest.skip(reason)
