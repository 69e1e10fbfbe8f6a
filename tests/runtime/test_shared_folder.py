"""A folder that is not shared by all hosts is rejected before anything is written to it."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc3d.runtime import shared_folder
from hpc3d.runtime.host_map import Homes
from hpc3d.runtime.shared_folder import REMEDY, refuse_unshared

HOMES = Homes(["hn1", "hn1", "hn2", "hn2", "hn3"], [0, 0, 2, 2, 4])


class Refused(Exception):
    pass


class Job:
    """Rank of `size` threads, which all make the same calls."""

    def __init__(self, rank, size, table, meet):
        self.rank, self.size, self.table, self.meet = rank, size, table, meet
        self.comm = SimpleNamespace(bcast=lambda value: self.gather(value)[0])

    def gather(self, value):
        self.table[self.rank] = value
        self.meet.wait(120)
        values = [*self.table]
        self.meet.wait(120)
        return values

    def refuse(self, problem):
        raise Refused(problem)


def asked(homes, folder):
    """Return the error of each rank of a job on these hosts, or None if the rank may continue."""
    size = len(homes.hosts)
    table, meet, said = [None] * size, threading.Barrier(size), [None] * size

    def work(rank):
        try:
            refuse_unshared(Job(rank, size, table, meet), homes, lambda: Path(folder))
        except Refused as refused:
            said[rank] = str(refused)

    threads = [threading.Thread(target=work, args=[rank], name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def assert_refused(said, line):
    """Assert that rank 0 prints the error, and that no rank continues."""
    assert said[0] == line and None not in said


@pytest.fixture
def views(monkeypatch):
    """Return {rank: number of checks until it sees others' files}, for ranks with their own view,
    and the files that were checked."""
    delays, looked, exists = {}, [], Path.exists

    def seen(path):
        name = threading.current_thread().name
        if not (name.isdigit() and path.name.startswith(".hpc3d-")):
            return exists(path)
        rank = int(name)
        looked.append((rank, path))
        delays[rank] = delays.get(rank, 0) - 1
        return delays[rank] < 0 and exists(path)

    monkeypatch.setattr(Path, "exists", seen)
    monkeypatch.setattr(shared_folder, "SEEN_WITHIN", 0.5)
    return delays, looked


def test_folder_visible_on_all_hosts_is_accepted(views, tmp_path):
    _, looked = views
    assert asked(HOMES, tmp_path) == [None] * 5
    assert sorted(rank for rank, _ in looked) == [2, 4]
    assert not list(tmp_path.iterdir())


def test_file_may_appear_late_as_on_nfs(views, tmp_path):
    views[0][2] = 2
    assert asked(HOMES, tmp_path) == [None] * 5
    assert [rank for rank, _ in views[1]].count(2) == 3


def test_hosts_that_do_not_see_the_folder_are_named_on_all_ranks(views, tmp_path):
    views[0][4] = 10**6
    line = f"{tmp_path}: hn3 does not see the files of hn1 there; {REMEDY}"
    assert_refused(asked(HOMES, tmp_path), line)
    assert not list(tmp_path.iterdir())


def test_parent_of_a_new_folder_is_checked_on_several_hosts(views, tmp_path):
    views[0].update({2: 10**6, 4: 10**6})
    out = tmp_path / "results" / "new"
    line = f"{out}: hn2 and hn3 do not see the files of hn1 in {tmp_path}; {REMEDY}"
    assert_refused(asked(HOMES, out), line)
    assert not list(tmp_path.iterdir())


def test_single_host_writes_no_probe_file(views, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda *_, **__: pytest.fail("a file"))
    assert asked(Homes(["hn1"] * 3, [0] * 3), tmp_path) == [None] * 3
    assert not views[1]


def test_folder_is_not_probed_if_rank_0_cannot_write(views, tmp_path, monkeypatch):
    def touch(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "touch", touch)
    assert asked(HOMES, tmp_path) == [None] * 5
    assert not views[1]
