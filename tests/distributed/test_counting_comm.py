"""Collectives pass through a CountingComm unchanged, and its counts name the ranks that the others wait for."""

import re
import threading

import pytest
import torch

from kasoku.core import Comm, Solo, Threads
from kasoku.distributed.counting_comm import CountingComm, describe_stragglers, stacks
from kasoku.distributed.liveness import Watchdog


def test_collectives_pass_through_unchanged_and_are_counted() -> None:
    def act(inner: Comm) -> list[float]:
        comm = CountingComm(inner, Watchdog().start(Solo(), ("", 0)).activity)
        x, out = torch.arange(4.0) + comm.rank, torch.empty(2)
        comm.all_reduce(x, op="max").wait()
        comm.reduce_scatter(out, x).wait()
        comm.all_gather(x, out).wait()
        assert comm.broadcast_object("a" if comm.rank == 0 else "b") == "a"
        assert comm.gather_objects(comm.rank) == [0, 1]
        if comm.rank == 0:
            comm.send(x, to=1).wait()
        else:
            comm.receive(x, source=0).wait()
        channel = comm.channel()
        channel.all_reduce(x).wait()
        main, other = (count.report(labels=True) for count in comm.activity.counts[1:])
        assert (main["started"], main["waits"]) == (6, "")
        assert main["labels"]["1"] == "all_reduce #1 of 4 float32"
        assert main["labels"]["4"] == "broadcast_object #4"
        assert (other["started"], [count.name for count in comm.activity.counts[2:]]) == (1, [" on channel 2"])
        return x.tolist()

    assert Threads(2).run(act) == [[4.0, 8.0, 12.0, 16.0]] * 2


def test_the_places_of_threads_are_seen_from_another_one_the_main_thread_first() -> None:
    found: dict[str, list[str]] = {}
    release = threading.Event()
    sleeper = threading.Thread(target=release.wait, args=(60,), name="a sleeper")
    sleeper.start()

    def look() -> None:
        found.update(stacks())
        release.set()

    def main_waits_here() -> None:
        threading.Thread(target=look).start()
        release.wait(60)

    main_waits_here()
    sleeper.join()
    assert next(iter(found)) == "MainThread"
    here = r"distributed/test_counting_comm[.]py:\d+ test_the_places\S*main_waits_here"
    assert any(re.fullmatch(here, place) for place in found["MainThread"][:6])
    assert re.match(r".*/threading.py:\d+ \S*wait", found["a sleeper"][0])
    assert max(map(len, found.values())) <= 24


def _report(started: int, waits: str = "", labels: dict[str, str] | None = None) -> dict[str, object]:
    return {"counts": {"": {"started": started, "waits": waits, "labels": labels or {}}}, "rests": False}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            [_report(7, "b #6", {"6": "b #6"}), _report(5), _report(5)],
            "[1, 2] have not joined b #6, which [0] waits in",
        ),
        ([_report(5), _report(7, "", {"6": "b #6", "7": "c #7"})], "[0] has not joined b #6, which [1] has started"),
        ([_report(5), _report(90)], "[0] has not joined collective #6, which [1] has started"),
        ([_report(5), _report(5, "receive from rank 0")], "[0] has made none, and [1] waits in receive from rank 0"),
        (
            [_report(5, "b #5"), _report(5, "b #5")],
            "all wait, [0] in b #5 (the network? or ranks that wait for each other)",
        ),
        ([_report(5), _report(5)], "[0, 1] have made none, and none waits for another (data? the device?)"),
    ],
)
def test_who_is_behind(told: list[dict[str, object]], line: str) -> None:
    assert describe_stragglers(told, str) == line
    for report in told:
        report["stacks"] = {"MainThread": [f"{name}.py:1 {name}" for name in "abcde"], "other": ["z.py:1 z"]}
    more = describe_stragglers(told, str).removeprefix(line)
    places = " < ".join(f"{name}.py:1 {name}" for name in "abcd")
    assert re.fullmatch(rf"; rank [012] is at {places}" if "all wait" not in line else "", more)
