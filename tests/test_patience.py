"""What takes long says where it is, and what does not is silent."""

import logging
import time

import pytest

from hpc3d.patience import patience

log = logging.getLogger("hpc3d.somewhere")


def test_the_newest_record_is_said_after_a_while(capsys):
    with patience("plan", first=0.2):
        for number in range(1000):
            log.info("%d of 1000", number)
        deadline = time.monotonic() + 20
        while (said := capsys.readouterr().err).count("\n") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert said.splitlines()[0] == "hpc3d.plan: 0 s: 999 of 1000"


def test_what_is_quick_is_silent(capsys):
    with patience("plan", first=0.2):
        log.info("begun")
    time.sleep(0.4)
    assert capsys.readouterr() == ("", "")
    assert not logging.getLogger("hpc3d").handlers


def test_an_error_goes_on():
    with pytest.raises(ValueError, match="bad"), patience("plan"):
        raise ValueError("bad")
