"""Ranks that take turns: deterministic, and every mistake is named."""

import pytest
import torch

from kasoku.core import Comm, DeadlockError, InputError, Solo, Threads


def test_sums_are_taken_in_rank_order_and_reach_every_rank():
    def rank(comm: Comm):
        sums, means, most = (torch.tensor([float(comm.rank + 1), 10.0]) for _ in range(3))
        works = [comm.all_reduce(sums), comm.all_reduce(means, op="mean"), comm.all_reduce(most, op="max")]
        for work in reversed(works):
            work.wait()
            work.wait()  # may be called again
            assert work.done()
        return sums.tolist(), means.tolist(), most.tolist()

    assert Threads(3).run(rank) == [([6.0, 30.0], [2.0, 10.0], [3.0, 10.0])] * 3


def test_scatter_and_gather():
    def rank(comm: Comm):
        part, whole = torch.empty(2), torch.empty(4)
        comm.reduce_scatter(part, torch.arange(4.0) + comm.rank).wait()
        comm.all_gather(whole, part).wait()
        return part.tolist(), whole.tolist()

    assert Threads(2).run(rank) == [([1.0, 3.0], [1.0, 3.0, 5.0, 7.0]), ([5.0, 7.0], [1.0, 3.0, 5.0, 7.0])]


def test_letters_arrive_in_the_order_they_were_sent():
    def rank(comm: Comm):
        if comm.rank == 0:
            for i in range(3):
                comm.send(torch.tensor([float(i)]), to=1)
            return []
        found = []
        for _ in range(3):
            x = torch.empty(1)
            comm.receive(x, source=0).wait()
            found.append(x.item())
        return found

    assert Threads(2).run(rank) == [[], [0.0, 1.0, 2.0]]


def test_objects():
    def rank(comm: Comm):
        return comm.broadcast_object(f"of {comm.rank}", root=1), comm.gather_objects(comm.rank)

    assert Threads(3).run(rank) == [("of 1", [0, 1, 2])] * 3


def test_a_run_is_the_same_every_time_and_random_states_do_not_mix():
    def rank(comm: Comm):
        torch.manual_seed(comm.rank)
        drawn = []
        for _ in range(3):
            x = torch.rand(1)
            drawn.append(x.item())
            comm.all_reduce(x).wait()
            drawn.append(x.item())
        return drawn

    before = torch.get_rng_state()
    first, second = Threads(4).run(rank), Threads(4).run(rank)
    assert first == second
    assert torch.equal(before, torch.get_rng_state())
    alone = torch.Generator().manual_seed(2)
    assert [first[2][i] for i in (0, 2, 4)] == [torch.rand(1, generator=alone).item() for _ in range(3)]


def test_a_deadlock_says_what_each_rank_waits_for():
    def rank(comm: Comm):
        x = torch.zeros(1)
        if comm.rank == 0:
            comm.receive(x, source=1).wait()
        elif comm.rank == 1:
            comm.all_reduce(x).wait()

    with pytest.raises(DeadlockError) as error:
        Threads(3).run(rank)
    assert str(error.value) == (
        "deadlock: rank 0 waits for message 0 from rank 1 to rank 0; "
        "rank 1 waits for collective 0 (all_reduce sum of 1 float32); rank 2 has ended"
    )


def test_collectives_that_do_not_match_are_named():
    def rank(comm: Comm):
        comm.all_reduce(torch.zeros(2 + comm.rank)).wait()

    with pytest.raises(InputError) as error:
        Threads(2).run(rank)
    assert "rank 1 calls all_reduce sum of 3 float32, the other ranks call all_reduce sum of 2 float32" in str(
        error.value
    )


def test_the_first_failure_is_the_one_that_is_raised():
    def rank(comm: Comm):
        if comm.rank == 1:
            raise ZeroDivisionError("rank 1")
        comm.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(ZeroDivisionError, match="rank 1"):
        Threads(3).run(rank)


def test_wrong_uses_are_one_line():
    with pytest.raises(InputError, match=r"Threads\(0\): at least 1 rank"):
        Threads(0)
    with pytest.raises(InputError, match=r'all_reduce.op="prod".: one of "sum", "mean", "max"'):
        Threads(2).run(lambda comm: comm.all_reduce(torch.zeros(1), op="prod").wait())
    with pytest.raises(InputError, match="this job has one rank"):
        Solo().send(torch.zeros(1), to=1)


def test_one_rank_alone_changes_nothing():
    comm, x, out = Solo(), torch.arange(3.0), torch.empty(3)
    comm.all_reduce(x, op="mean").wait()
    comm.all_gather(out, x).wait()
    assert out.tolist() == x.tolist() == [0, 1, 2]
    assert comm.broadcast_object("x") == "x"
    assert comm.gather_objects("x") == ["x"]
