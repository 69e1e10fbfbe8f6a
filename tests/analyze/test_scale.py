"""Memory use of the report of a large run, and the size of its page."""

import re
import subprocess
import sys

import pytest

from hpc3d.trace.merge import merge
from tests.trace.large import generate

MEASURE = """\
import sys, time
from tests.memory import peak_bytes
from hpc3d import report
code = report.main(sys.argv[1:])
print(f"{time.process_time():.1f} s of CPU time, {peak_bytes()} bytes", file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
def test_report_of_64_ranks_and_100_steps_takes_less_than_a_gigabyte(tmp_path):
    generate(tmp_path, (4, 2, 4, 2), steps=100, events=600)
    merge(tmp_path)
    words = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=True)
    print(done.stderr)
    assert int(re.search(r"(\d+) bytes", done.stderr)[1]) < 1e9
    page = tmp_path / "report" / "report.html"
    assert page.stat().st_size < 6e6
    assert "All 64 ranks." in page.read_text(encoding="utf-8")
