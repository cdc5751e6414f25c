"""What the doctor says, from values."""

from itertools import permutations

import msgspec
import pytest

from rankwire.launch.diagnosis import Cell, Facts, Report, diagnose


def fact(rank: int, **changes) -> Facts:
    values = {
        "host": "here", "boot": "b", "net_namespace": 1, "pid_namespace": 1, "cores": 8,
        "max_descriptors": 1024, "somaxconn": 4096, "version": "1", "python": "3",
    }  # fmt: skip
    return Facts(rank, **(values | changes))


def world(size: int, **changes) -> list[Facts]:
    return [fact(rank, **changes) for rank in range(size)]


def links(size: int, **changes) -> list[Cell]:
    values = {"transport": "unix", "single_copy": True, "latency": 20e-6, "bandwidth": 1e10}
    return [Cell(src, dst, **(values | changes)) for src, dst in permutations(range(size), 2)]


def only_advice(facts, cells):
    report = diagnose(facts, cells)
    assert len(report.advice) == 1, report.advice
    return report.advice[0]


def test_a_healthy_world_gets_no_advice():
    report = diagnose(world(4), links(4))
    assert report.advice == []
    assert report.marked == []
    assert report.is_well


def test_a_rank_that_cannot_be_reached_is_bad_and_named_with_the_reason():
    cells = links(3)
    cells[0] = Cell(0, 1, why_not="cannot connect to 10.0.0.1:5: Connection refused")
    report = diagnose(world(3), cells)
    assert not report.is_well
    assert report.marked == [(0, 1)]
    assert "0→1 cannot be reached: cannot connect to 10.0.0.1:5" in report.advice[0].what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"pid_namespace": 1}, {"pid_namespace": 2}], "--pid"),
        ([{"ptrace_scope": 1}, {}], "kernel.yama.ptrace_scope"),
        ([{"has_seccomp": True}, {}], "seccomp"),
        ([{}, {}], "one user"),
    ],
)
def test_refused_single_copy_is_reported_with_how_to_allow_it(changes, words):
    facts = [fact(rank, **change) for rank, change in enumerate(changes)]
    reason = "the kernel refuses to copy memory of process 7: Operation not permitted"
    advice = only_advice(facts, links(2, single_copy=False, why_not=reason))
    assert words in advice.change
    assert "0→1, 1→0: the kernel refuses to copy memory" in advice.what
    assert not advice.is_bad


def test_a_rank_that_shares_no_memory_is_named_with_the_reason():
    facts = [fact(0), fact(1, why_nothing_shared="Operation not permitted")]
    advice = only_advice(facts, links(2))
    assert "no shared memory at rank 1: Operation not permitted" in advice.what
    assert "memfd_create" in advice.change
    assert not advice.is_bad


def test_tcp_within_a_host_is_reported():
    tcp = links(2, transport="tcp", single_copy=False)
    assert "XDG_RUNTIME_DIR" in only_advice(world(2), tcp).change
    apart = [fact(0), fact(1, net_namespace=2)]
    assert "network namespaces" in only_advice(apart, tcp).what
    assert diagnose([fact(0), fact(1, boot="c", host="there")], tcp).advice == []


def test_a_link_much_slower_than_others_of_its_kind_is_reported():
    cells = links(3)
    cells[2] = msgspec.structs.replace(cells[2], latency=1e-3)
    cells[5] = msgspec.structs.replace(cells[5], bandwidth=1e9)
    report = diagnose(world(3), cells)
    assert report.marked == [(1, 0), (2, 1)]
    assert "1→0, 2→1" in report.advice[0].what
    assert report.is_well


def test_two_links_prove_nothing_about_each_other():
    cells = links(2)
    cells[0] = msgspec.structs.replace(cells[0], latency=1.0)
    assert diagnose(world(2), cells).marked == []


@pytest.mark.parametrize(
    ("changes", "words", "is_bad"),
    [
        ({"spins": False, "cores": 2}, "4 ranks share 2 cores on here", False),
        ({"max_descriptors": 70}, "may open 70 files", True),
        ({"somaxconn": 3}, "3 connections may wait on here", False),
    ],
)
def test_a_host_that_is_short_of_a_resource_is_reported(changes, words, is_bad):
    advice = only_advice(world(4, **changes), links(4))
    assert words in advice.what
    assert advice.is_bad == is_bad


def test_differences_between_hosts_are_reported():
    facts = [fact(0, version="1", mtu=1500), fact(1, version="2", mtu=9000)]
    texts = [advice.what for advice in diagnose(facts, links(2)).advice]
    assert texts == [
        "the version of rankwire differs: 1 (ranks 0), 2 (ranks 1)",
        "the MTU differs: 1500 (ranks 0), 9000 (ranks 1)",
    ]


def test_many_links_are_summed_up():
    report = diagnose(world(5), links(5, single_copy=False, why_not="no"))
    assert "0→1, 0→2, 0→3, 0→4 and 16 more" in report.advice[0].what


def test_a_report_survives_json():
    report = diagnose(world(3), links(3))
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
