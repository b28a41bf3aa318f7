"""Ranks of unequal shares: the same batches, the same mean over all images, whatever the shares."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from contracts import Batches, Net, rule
from contracts import one_thread as one_thread
from kasoku.core import Comm, InputError, Job, Solo, Technique, Threads
from kasoku.data import Mix, Shares, by_speed, digits, loader
from kasoku.distributed import AllReduce, Graded, Overlap, VirtualRanks

BATCH, STEPS = 32, 4


@dataclass
class Run:
    """What came of a few steps of one rank."""

    weights: dict[str, Tensor]
    indices: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def network(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def trained(comm: Comm, *techniques: Technique, parts: int = 1, norm: bool = False) -> Run:
    batches = loader(digits(), "train", BATCH, comm=comm, parts=parts)
    job = Job(network(norm), rule, loader=batches, comm=comm, accumulate=parts).apply(*techniques)
    run = Run({})
    for number, (x_NCHW, y_N) in enumerate(job.loader, start=1):
        loss = job.loss(job.model(x_NCHW), y_N)
        (loss / job.accumulate).backward()
        run.indices.append(batches.index_N.tolist())
        run.losses.append(loss.item())
        if number % job.accumulate == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
            if job.steps == STEPS:
                break
    job.drain()
    run.weights = {name: x.clone() for name, x in job.model.state_dict().items()}
    return run


def assert_near(one: Run, other: Run, tolerance: float = 1e-6) -> None:
    for name, x in one.weights.items():
        assert torch.allclose(x.float(), other.weights[name].float(), atol=tolerance), name


@pytest.mark.parametrize("shares", [(24, 8), (31, 1), (16, 16)])
@pytest.mark.parametrize("share", [AllReduce(), Overlap(Graded(first=1, power=1.5, least_bytes=1000))])
def test_unequal_shares_train_to_the_weights_of_one_rank(shares: tuple[int, int], share: Technique):
    alone = trained(Solo())
    ranks = Threads(2).run(lambda comm: trained(comm, Shares(shares), share))
    for rank in ranks:
        assert_near(alone, rank)
    assert torch.tensor(alone.losses).allclose(torch.tensor([r.losses for r in ranks]).mean(0), atol=1e-6)


def test_without_their_weight_unequal_shares_would_train_to_others():
    def unweighed(comm: Comm) -> Run:
        return trained(comm, Shares((31, 1)), AllReduce(), Unweighed())

    with pytest.raises(AssertionError):
        assert_near(trained(Solo()), Threads(2).run(unweighed)[0], 1e-4)


class Unweighed(Technique):
    """Puts the plain loss back."""

    def apply(self, job: Job) -> None:
        job.patch(job, "loss", nn.functional.cross_entropy)


def test_the_batches_are_those_of_one_rank_image_by_image():
    alone = trained(Solo())
    one, other = Threads(2).run(lambda comm: trained(comm, Shares((20, 12)), AllReduce()))
    assert [len(index) for index in one.indices] == [20] * STEPS
    assert [a + b for a, b in zip(one.indices, other.indices, strict=True)] == alone.indices


def test_shares_in_parts_are_accumulated():
    alone = trained(Solo())
    ranks = Threads(2).run(lambda comm: trained(comm, Shares((24, 8)), AllReduce(), parts=2))
    assert [len(index) for index in ranks[0].indices] == [12] * 2 * STEPS
    assert_near(alone, ranks[0])


def test_with_at_once_a_rank_takes_as_many_parts_as_its_share_has():
    alone = trained(Solo())
    shares = Shares((24, 8), at_once=8)
    one, other = Threads(2).run(lambda c: trained(c, shares, AllReduce(), parts=shares.parts(c.rank, 1)))
    assert [len(index) for index in one.indices] == [8] * 3 * STEPS
    assert [len(index) for index in other.indices] == [8] * STEPS
    assert_near(alone, one)
    with pytest.raises(InputError, match="at_once=8 makes 3 parts of 24 images, and the loader has 1"):
        Threads(2).run(lambda comm: trained(comm, shares, AllReduce()))


@pytest.mark.parametrize(("norm_batch", "parts"), [(8, 1), (4, 2)])
def test_shares_in_groups_of_norm_batch_keep_the_statistics_of_one_rank(norm_batch: int, parts: int):
    virtual = VirtualRanks(norm_batch)
    alone = trained(Solo(), virtual, norm=True)
    ranks = Threads(2).run(lambda c: trained(c, Shares((24, 8)), AllReduce(), virtual, parts=parts, norm=True))
    for rank in ranks:
        assert_near(alone, rank, 1e-5)


def test_whole_shares_as_groups_give_all_ranks_the_same_statistics():
    one, other = Threads(2).run(lambda comm: trained(comm, Shares((24, 8)), AllReduce(), VirtualRanks(), norm=True))
    assert_near(one, other, 0.0)
    assert one.weights["1.running_mean"].abs().sum() > 0


def test_mixed_labels_keep_their_shares():
    def rank(comm: Comm) -> Run:
        return trained(comm, Shares((24, 8)), AllReduce(), Mix(0.2, 0.0))

    one, other = Threads(2).run(rank)
    assert_near(one, other, 0.0)
    assert [len(index) for index in one.indices] == [24] * STEPS
    assert [len(index) for index in other.indices] == [8] * STEPS


@pytest.mark.parametrize(("parts", "accumulate"), [(1, 2), (2, 2)])
def test_equal_shares_change_nothing_however_a_step_is_made_up(parts: int, accumulate: int):
    def rank(comm: Comm) -> tuple[float, float]:
        batches = loader(digits(), "train", BATCH, comm=comm, parts=parts)
        job = Job(network(False), rule, loader=batches, comm=comm, accumulate=accumulate)
        x_NCHW, y_N = next(iter(job.loader))
        plain = job.loss(job.model(x_NCHW), y_N).item()
        job.apply(Shares((16, 16)))
        return plain, job.loss(job.model(x_NCHW), y_N).item()

    for plain, weighed in Threads(2).run(rank):
        assert weighed == pytest.approx(plain, rel=1e-6)


def test_shares_that_split_groups_of_norm_batch_are_refused_on_all_ranks():
    def rank(comm: Comm) -> str:
        with pytest.raises(InputError) as caught:
            trained(comm, Shares((24, 8)), AllReduce(), VirtualRanks(16), norm=True)
        return str(caught.value)

    one, other = Threads(2).run(rank)
    line = "norm_batch=16: ranks take (24, 8) images in 1 parts: each part must be a multiple of norm_batch"
    assert one == other == line


def test_close_gives_equal_shares_back():
    def rank(comm: Comm) -> tuple[int, int]:
        batches = loader(digits(), "train", BATCH, comm=comm)
        job = Job(network(False), rule, loader=batches, comm=comm).apply(Shares((24, 8)))
        own = batches.pipeline.own_batch
        job.close()
        return own, batches.pipeline.own_batch

    assert Threads(2).run(rank) == [(24, 16), (8, 16)]


@pytest.mark.parametrize(
    ("images_per_s", "unit", "shares"),
    [
        ((100.0, 50.0), 1, (43, 21)),
        ((100.0, 91.0), 1, (32, 32)),
        ((100.0, 50.0), 16, (48, 16)),
        ((1000.0, 1.0), 1, (63, 1)),
        ((1.0, 1.0, 1.0), 1, (22, 21, 21)),
        ((3.0, 2.0, 1.0), 8, (32, 24, 8)),
    ],
)
def test_shares_are_in_proportion_to_speed_in_whole_units(images_per_s, unit: int, shares: tuple[int, ...]):
    assert by_speed(64, images_per_s, unit=unit) == shares


def test_shares_add_up_and_leave_out_no_rank():
    dice = torch.Generator().manual_seed(0)
    for ranks in range(1, 12):
        speeds = torch.rand(ranks, generator=dice).add(1e-3).square().tolist()
        for batch in (ranks, 2 * ranks + 1, 1000):
            shares = by_speed(batch, speeds)
            assert sum(shares) == batch
            assert min(shares) >= 1
            order = sorted(range(ranks), key=lambda rank: speeds[rank])
            assert [shares[rank] for rank in order] == sorted(shares), "the faster never takes less"


def test_what_does_not_fit_is_refused():
    def refused(match: str, technique: Shares, parts: int = 1) -> None:
        with pytest.raises(InputError, match=match):
            Threads(2).run(lambda comm: trained(comm, technique, parts=parts))

    refused("add up to the batch", Shares((24, 9)))
    refused("for 2 ranks", Shares((16, 8, 8)))
    refused("a multiple of the parts", Shares((25, 7)), parts=2)
    with pytest.raises(InputError, match=r"images=\(32, 0\): at least 1; the images of each rank"):
        Shares((32, 0))
    with pytest.raises(InputError, match="in units of 24"):
        by_speed(64, [1.0, 2.0], unit=24)
    with pytest.raises(InputError, match="speeds above 0"):
        by_speed(64, [1.0, 0.0])

    def plain(comm: Comm) -> None:
        Job(Net(), rule, loader=Batches(rank=comm.rank, size=comm.size), comm=comm).apply(Shares((8, 8)))

    with pytest.raises(InputError, match=r"give the job a kasoku\.data\.loader"):
        Threads(2).run(plain)
