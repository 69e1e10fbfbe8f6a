"""Pytest plugin that reports the time of the tests (`make test-profile`).

    python -m pytest -p tests.profile --every 4 -n 2 tests

It runs one of `--every` cases of each test function, and multiplies their costs. A cost is the
wall time and the CPU time of a test, its fixtures and its child processes. The tables list tiers,
kinds and files of tests, the most expensive ones first. `--costs FILE` writes the CPU seconds of
each test function; tests/xdist_order.py uses those in tests/costs.json to order the work.
"""

import json
import resource
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

KINDS = ("ranks", "processes", "this process")
TIERS = ("hosts", "slurm", "slow")
LEAST = 1  # CPU seconds of a test function in tests/costs.json
STARTED = {"ranks": 0, "processes": 0}


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run one of so many cases of a function")
    parser.addoption("--costs", type=Path, help="JSON file: CPU seconds of each test function")


def count(event, arguments):
    """Count the processes that a test starts, by kind."""
    if event == "subprocess.Popen":
        ranks = any("mpirun" in str(word) for word in arguments[1][:1])
        STARTED["ranks" if ranks else "processes"] += 1


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        sys.addaudithook(count)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("costs")))


def pytest_collection_modifyitems(config, items):
    """Select every n-th case of each function; `weight` is the number of cases it represents."""
    every, cases = config.getoption("--every"), defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = []
    for of in cases.values():
        few = of[every // 2 :: every] or of[:1]
        for item in few:
            item.weight = len(of) / len(few)
        chosen += few
    keep = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = [item for item in items if item in keep]


def spent():
    """Return wall seconds, CPU seconds, and the number of started processes so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [
        time.perf_counter(),
        sum(each.ru_utime + each.ru_stime for each in used),
        *STARTED.values(),
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.begin = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        used = [now - before for now, before in zip(spent(), item.begin, strict=True)]
        tier = next((tier for tier in TIERS if item.get_closest_marker(tier)), "quick")
        item.user_properties.append(("cost", (tier, item.weight, *used)))
    return (yield)


class Costs:
    """Costs of all tests, also of those in workers of pytest-xdist."""

    def __init__(self, path):
        self.path, self.rows = path, []

    def pytest_runtest_logreport(self, report):
        found = dict(report.user_properties) if report.when == "teardown" else {}
        if "cost" in found:
            names = "tier", "cases", "wall", "cpu", "jobs", "processes"
            self.rows.append({"test": report.nodeid, **dict(zip(names, found["cost"]))})

    def pytest_terminal_summary(self, terminalreporter):
        for title, key in (("tier", tier_of), ("kind", kind_of), ("file", file_of)):
            for line in table(title, key, self.rows):
                terminalreporter.write_line(line)

        if self.path:
            sums = Counter()
            for row in self.rows:
                sums[row["test"].partition("[")[0]] += row["cases"] * row["cpu"]
            costs = {test: round(cpu) for test, cpu in sorted(sums.items()) if cpu >= LEAST}
            self.path.write_text(json.dumps(costs, indent=0) + "\n", encoding="utf-8")


def tier_of(row):
    return row["tier"]


def file_of(row):
    return row["test"].partition("::")[0]


def kind_of(row):
    return KINDS[0] if row["jobs"] else KINDS[1] if row["processes"] else KINDS[2]


def table(title, key, rows, most=60):
    """Return rows of a Markdown table, the most expensive ones first."""
    sums = defaultdict(lambda: [0] * 5)
    for row in rows:
        for at, value in enumerate((1, row["wall"], row["cpu"], row["jobs"], row["processes"])):
            sums[key(row)][at] += row["cases"] * value
    yield f"| {title} | tests | wall s | CPU s | mpirun | other processes |"
    yield "|---|---|---|---|---|---|"
    for name, values in sorted(sums.items(), key=lambda each: -each[1][2])[:most]:
        yield f"| {name} | " + " | ".join(f"{value:.0f}" for value in values) + " |"
