"""Cases that share an MPI job have separate results (tests/jobs.py, tests/xdist_order.py)."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests import jobs, strided, xdist_order
from tests.jobs import Case, outcomes_of
from tests.on_ranks import DONE

CASES = [Case(2, "auto", name) for name in "abcd"]


def fake_launcher(failing, hanging=()):
    """Fake launcher whose job ends in the first case of `failing`; records the cases of jobs."""
    started = []

    def mpirun(ranks, flag, program, module, transport, *names, **how):
        started.append(names)
        passed = []
        for name in names:
            if name in failing:
                return SimpleNamespace(stdout="".join(passed), stderr=f"{name}!", returncode=1)
            passed.append(f"{DONE}{name}\n")
        return SimpleNamespace(stdout="".join(passed), stderr="", returncode=0)

    return mpirun, started


def test_failed_case_is_named_and_another_job_runs_the_rest(monkeypatch):
    launcher, started = fake_launcher(failing="bd")
    monkeypatch.setattr(jobs, "mpirun", launcher)
    found = outcomes_of("a.module", CASES)
    assert [bool(found[case]) for case in CASES] == [False, True, False, True]
    assert "b!" in found[CASES[1]] and "d!" in found[CASES[3]]
    assert started == [("a", "b", "c", "d"), ("c", "d")]


def test_job_that_ends_early_without_an_error_fails_the_next_case(monkeypatch):
    short = SimpleNamespace(stdout=f"{DONE}a\n", stderr="", returncode=0)
    monkeypatch.setattr(jobs, "mpirun", lambda *words, **how: short)
    found = outcomes_of("a.module", CASES[:2])
    assert not found[CASES[0]] and "exit 0" in found[CASES[1]]


def test_longest_units_come_first_and_long_files_are_split(monkeypatch):
    costs = {"a.py::one": 5, "b.py::one": xdist_order.LONG + 1, "b.py::two": 9}
    monkeypatch.setattr(xdist_order, "costs", lambda: costs)
    monkeypatch.setattr(xdist_order, "starts_jobs", lambda unit: "job" in unit)
    config = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=SimpleNamespace())
    monkeypatch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda _: ["", ""])
    scheduler = xdist_order.LongestFirst(config)
    assert scheduler._split_scope("a.py::one[case]") == "a.py"
    assert scheduler._split_scope("b.py::two[case]") == "b.py::two"
    sent = []
    workers = [Mock(send_runtest_some=sent.append) for _ in range(2)]
    tests = ["a.py::one[x]", "b.py::two[x]", "b.py::one[x]", "job.py::one[x]"]
    for worker in workers:
        scheduler.assigned_work[worker] = {}
        scheduler.registered_collections[worker] = tests
    for test in tests:
        scheduler.workqueue[scheduler._split_scope(test)] = {test: False}
    scheduler._assign_work_unit(workers[0])  # which starts jobs
    scheduler._assign_work_unit(workers[1])
    scheduler._assign_work_unit(workers[1])
    assert sent == [[3], [2], [1]]


def test_cases_of_a_slow_test_are_spread_over_seven_days(request, monkeypatch):
    file = request.node.parent.nodeid
    monkeypatch.setattr(strided, "_places", lambda: {f"{file}::first": 7, f"{file}::next": 8})

    def days(name, *marks, **params):
        item = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        item.callspec = SimpleNamespace(params=params)
        for mark in marks:
            item.add_marker(mark)
        strided.mark_slow(item)
        return {*strided.days_of(item)}

    slow = pytest.mark.slow
    assert (days("first", slow), days("next", slow)) == ({0}, {1})
    cases = [days(f"first[{case}]", slow) for case in range(60)]
    assert set.union(*cases) == {*range(7)} and {len(each) for each in cases} == {1}
    shared = {*map(frozenset, (days(f"first[{case}]", slow, case=case) for case in CASES))}
    assert len(shared) == 1  # one MPI job
    for always in (days("first"), days("first", slow, strided.daily)):
        assert always == {*range(7)}
    assert days("first", slow, strided.rotating(2)) == {2}


@pytest.mark.parametrize(("today", "skipped"), [("2", False), ("3", True), ("all", False)])
def test_day_selects_the_rotating_tests(today, skipped, monkeypatch):
    monkeypatch.setattr(strided, "TODAY", today)
    assert strided.rotating(9).args == (skipped,)
