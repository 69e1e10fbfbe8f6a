"""The CPU time of other processes, with known times of a host and its ranks."""

import os
from types import SimpleNamespace

import pytest

from hpc3d.runtime import other_processes
from hpc3d.runtime.other_processes import CpuTimes, OtherProcesses, cpu_times, share_of_others


def stat(path, *columns):
    path.write_text(f"cpu  {' '.join(map(str, columns))}\ncpu0 1 2 3\nintr 5\n")


def test_times_of_the_host_exclude_idle_and_guest_time(tmp_path, monkeypatch):
    """Columns: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    monkeypatch.setattr(other_processes, "_STAT", tmp_path / "stat")
    stat(tmp_path / "stat", 100, 20, 30, 700, 50, 1, 2, 3, 40, 5)
    found, tick = cpu_times(is_first=True), os.sysconf("SC_CLK_TCK")
    assert (found.busy, found.total) == pytest.approx((156 / tick, 906 / tick))
    assert cpu_times(is_first=False)[1:] == (0, 0)
    (tmp_path / "stat").write_text("something else")
    assert cpu_times(is_first=True)[1:] == (0, 0)
    (tmp_path / "stat").unlink()
    assert cpu_times(is_first=True)[1:] == (0, 0)


def test_share_is_that_of_the_busiest_host_without_its_ranks():
    """Host a: 10 s busy of 40 s, of which two ranks use 6 s. Host b: 5 s of 40 s, of one rank."""
    spent = [CpuTimes(4, 10, 40), CpuTimes(5, 5, 40), CpuTimes(2)]
    assert share_of_others("aba", spent) == pytest.approx(4 / 40)
    assert share_of_others("aba", [CpuTimes(9, 10, 40), *spent[1:]]) == 0
    assert share_of_others("a", [CpuTimes(1)]) is None, "unknown times of the host"
    assert share_of_others("a", [CpuTimes(0, 0.4, 0.9)]) is None, "too short"


def test_measurement_covers_the_time_since_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(other_processes, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(other_processes.time, "process_time", iter([2.0, 3.0]).__next__)
    tick = os.sysconf("SC_CLK_TCK")
    stat(tmp_path / "stat", 1000 * tick, 0, 0, 5000 * tick, 0, 0, 0, 0)
    job = SimpleNamespace(rank=0, kernels=["host"], gather=lambda value: [value])
    others = OtherProcesses(job)
    stat(tmp_path / "stat", 1003 * tick, 0, 0, 5007 * tick, 0, 0, 0, 0)
    assert others.share() == pytest.approx(0.2), "2 s of 10 s; the rank used 1 s"
