"""The status line, as text."""

from rankwire.launch.reporter import Counts, describe


def test_the_status_line_leaves_out_counts_of_zero():
    assert describe(Counts(running=4), 7.9) == "rankwire: 4 running (0:07)"
    assert describe(Counts(), 0.0) == "rankwire: 0 running (0:00)"


def test_the_status_line_has_all_counts():
    counts = Counts(running=3, up=3, done=1, failed=2, suspected=1)
    expected = "rankwire: 3 running, 3 up, 1 done, 2 failed, 1 suspected (1:02:03)"
    assert describe(counts, 3723.0) == expected


def test_the_status_line_counts_missing_nodes():
    assert describe(Counts(missing_nodes=1), 61.0) == "rankwire: waiting for 1 node (1:01)"
    assert "2 nodes" in describe(Counts(missing_nodes=2), 0.0)
