"""Skips tests on emulated hosts, with the reason, on machines that do not allow them."""

import pytest

from tests.hosts.emulated import available


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if reason := available():
        pytest.skip(reason)
