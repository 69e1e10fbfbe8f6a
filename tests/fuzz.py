"""Pytest plugin that repeats the tests with random cases, each time with other cases.

    python -m pytest -p tests.fuzz --timeout 0 --minutes 5 tests

It ends after the given time, or at the first failure, and then prints how to reproduce the
failure. It selects the tests that use hypothesis or the fixture `chance` (tests/conftest.py).
"""

import faulthandler
import resource
import secrets
import signal
import time
from functools import wraps

import hypothesis
import pytest

MEMORY = 8 << 30  # bytes that this process may take; more is a find, too
TEST = 400  # seconds that a test without examples may take


class TimeIsUp(KeyboardInterrupt):
    """Raised at the end: Hypothesis discards the interrupted example, unlike a skipped one."""


class Hang(BaseException):
    """Raised by slow examples; Hypothesis does not shrink them, which would take as long."""


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=5.0, help="how long to look for faults")
    parser.addoption("--hang", type=int, default=120, help="seconds that an example may take")


def pytest_configure(config):
    config.pluginmanager.register(Fuzz(config), "fuzz")


class Fuzz:
    """Session whose tests run until `end`; round r has the seed `seed` + r."""

    def __init__(self, config):
        self.config, self.end = config, time.monotonic() + 60 * config.getoption("--minutes")
        self.seed = int(config.getoption("--hypothesis-seed") or secrets.randbelow(1 << 32))
        self.rounds, self.examples, self.found, self.took = 0, 0, False, {}
        config.option.maxfail = 1
        hypothesis.settings.load_profile("fuzz")
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, self.hang)

    def pytest_report_header(self):
        return f"fuzz: {self.config.getoption('--minutes'):g} minutes from seed {self.seed} on"

    def pytest_collection_modifyitems(self, config, items):
        """Select the tests that draw, and record each of their examples before it runs."""
        drawing = [item for item in items if is_property(item) or "chance" in item.fixturenames]
        config.hook.pytest_deselected(items=[item for item in items if item not in drawing])
        items[:] = drawing
        for item in filter(is_property, items):
            handle = item.obj.hypothesis
            if not hasattr(handle.inner_test, "example"):  # of another case of the same test
                handle.inner_test = self.looked_at(handle.inner_test)

    def looked_at(self, test):
        @wraps(test)
        def example(*arguments, **drawn):
            if self.left() <= 0 and not self.found:
                raise TimeIsUp
            self.examples += 1
            self.watch(self.config.getoption("--hang"), drawn)
            try:
                return test(*arguments, **drawn)
            except Exception:
                self.found = True  # what follows makes it smaller
                raise
            finally:
                self.watch(0)

        example.example = True
        return example

    def watch(self, seconds, what=None):
        """Limit the time of what begins here to some seconds; 0 ends the limit."""
        self.what = what
        signal.alarm(seconds)
        faulthandler.cancel_dump_traceback_later()
        if seconds:  # for what never comes back to Python
            faulthandler.dump_traceback_later(seconds + 60, exit=True)

    def hang(self, *_):
        raise Hang(f"no end in sight: {self.what}")

    def left(self):
        return self.end - time.monotonic()

    def pytest_runtestloop(self, session):
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        while self.left() > 0:
            self.rounds += 1
            self.config.option.hypothesis_seed = str(self.seed + self.rounds)
            for item, after in zip(session.items, [*session.items[1:], None], strict=True):
                if self.left() <= self.took.get(item, 0):
                    return True  # fixtures that the last test left for this one are closed
                self.run(item, after)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        return True

    def run(self, item, after):
        start = time.monotonic()
        if is_property(item):
            hypothesis.seed(self.seed + self.rounds)(item.obj)
        else:
            self.watch(TEST, item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        self.watch(0)
        if not is_property(item):
            self.took[item] = time.monotonic() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        try:
            return (yield)
        except TimeIsUp:
            pytest.skip("the time is up")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.failed:
            how = f"--hypothesis-profile=fuzz --hypothesis-seed={self.seed + self.rounds}"
            report.sections.append(("to repeat", f"python -m pytest '{item.nodeid}' {how}"))
        return report

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"fuzz: {self.rounds} rounds from seed {self.seed} on, {self.examples} examples"
        )


def is_property(item):
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
