"""The status line, as text."""

from rankwire.launch.reporter import describe

COUNTS = {"running": 3, "up": 3, "done": 1, "failed": 2, "suspected": 1}


def test_the_status_line_leaves_out_counts_of_zero():
    counts = COUNTS | {"up": 0, "done": 0, "failed": 0, "suspected": 0}
    assert describe(counts, 0, 7.9) == "rankwire: 3 running (0:07)"
    assert describe(counts | {"running": 0}, 0, 0.0) == "rankwire: 0 running (0:00)"


def test_the_status_line_has_all_counts():
    expected = "rankwire: 3 running, 3 up, 1 done, 2 failed, 1 suspected (1:02:03)"
    assert describe(COUNTS, 0, 3723.0) == expected


def test_the_status_line_counts_missing_nodes():
    assert describe(COUNTS, 1, 61.0) == "rankwire: waiting for 1 node (1:01)"
    assert "2 nodes" in describe(COUNTS, 2, 0.0)
