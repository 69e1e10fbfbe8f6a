"""The key numbers at the top of a report."""

from hpc3d.analyze.report import cards


def test_memory_card_shows_the_highest_simultaneous_peak():
    rows = [
        {"rank": 0, "parameter": 30, "activation": 50, "all": 60},
        {"rank": 1, "parameter": 20, "activation": 70, "all": 75},
        {"rank": None, "parameter": 50, "activation": 120, "all": 135},
    ]
    assert cards._memory(rows) == ("75B", "highest peak, on rank 1")
    assert cards._memory([rows[0], rows[-1]]) == ("60B", "peak")


def test_straggler_card_names_a_rank_only_if_one_is_detected():
    rows = [{"rank": rank, "imposed_s": 0.003, "straggler": "no", "peers": 1} for rank in (1, 0)]
    assert cards._straggler(rows)[0] == "none"
    rows[1]["straggler"] = "yes"
    assert cards._straggler(rows) == ("rank 0", "its peers wait 3.00 ms per step for it")
    unknown = [each | {"straggler": None} for each in rows]
    assert cards._straggler(unknown) == ("unknown", "too few steps to decide")
    alone = [each | {"peers": 0} for each in unknown]
    assert cards._straggler(alone) == ("unknown", "no two ranks do the same work")
