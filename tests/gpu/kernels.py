"""The kernel tests of tests/cuda, with the same inputs, on the device instead of the emulator:
every kernel with every type, many sizes, and guards around all arrays."""

from pathlib import Path

from tests.gpu.child import DEVICE_LOST
from tests.gpu.guards import guarded
from tests.gpu.loader import launcher

TESTS = Path(__file__).parents[1] / "cuda"
SOME = 9  # of a quick run, every so many
NOT_HERE = {"faults", "launcher"}  # of tests of the emulator, and of whole trainers on it


def run(notes, device, quick, done):
    try:
        import pytest
    except ImportError:
        notes.write("skipped", reason="no pytest")
        return 0
    plugin = OnDevice(notes, device, SOME if quick else 1, done)
    words = ["-q", "-rN", "--tb=short", "-p", "no:cacheprovider", str(TESTS)]
    code = pytest.main(words, plugins=[plugin])
    if plugin.lost:
        return DEVICE_LOST
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code)


class OnDevice:
    """Pytest plugin that launches kernels on the device and records the result of each test."""

    def __init__(self, notes, device, every, done):
        self.notes, self.device, self.every, self.done = notes, device, every, done
        self.lost, self.reports = False, []

    def pytest_configure(self, config):
        from tests.cuda.conftest import ELSEWHERE

        config.stash[ELSEWHERE] = guarded(self.device, launcher(self.device))

    def pytest_collection_modifyitems(self, session, items):
        """Select the tests that launch kernels of the program."""
        self.session = session
        items[:] = [item for item in items if self.suits(item)][:: self.every]
        self.notes.write("cases", names=[name_of(item.nodeid) for item in items])
        items[:] = [item for item in items if name_of(item.nodeid) not in self.done]

    def suits(self, item):
        parameters = getattr(item, "callspec", None)
        real = parameters and parameters.params.get("real")
        known = getattr(real, "name", self.device.reals[0]) in self.device.reals
        return known and "emulate" in item.fixturenames and not NOT_HERE & {*item.fixturenames}

    def pytest_sessionfinish(self, session):
        """Do not repeat the recorded results on the terminal."""
        session.config.option.tbstyle = "no"

    def pytest_runtest_logstart(self, nodeid):
        self.notes.begin(name_of(nodeid))
        self.reports = []

    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid):
        bad = next((report for report in self.reports if not report.passed), None)
        seconds = sum(report.duration for report in self.reports)
        if bad is None:
            self.notes.end("passed", seconds)
        elif bad.skipped:
            self.notes.end("skipped", seconds, bad.longreprtext)
        else:
            self.notes.end("failed", seconds, said(bad.longreprtext), bad.longreprtext)
        if not self.device.alive():
            self.lost, self.session.shouldstop = True, "the device is lost"


def name_of(nodeid):
    return nodeid.removeprefix("tests/cuda/")


def said(text):
    """Return the lines of a report that state the error."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " ".join(lines) or text[-200:]
