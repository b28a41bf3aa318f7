"""Virtual ranks have the numerics of real ones; statistics for evaluation are exact."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from contracts import Net, assert_same, make, train, weights
from contracts import one_thread as one_thread
from helpers.ranks import on_processes, on_ranks
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.data import Dataset, Memory, loader
from kasoku.device import Seeded
from kasoku.distributed import AllReduce, Recalibrate, VirtualRanks
from kasoku.distributed.batchnorm.virtual_ranks import momentum
from kasoku.optim import EMA, sgd

IMAGES, SIDE, BATCH = 150, 8, 32


def images() -> Dataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)
    labels = (x[:, :4].float().mean((1, 2, 3)) > x[:, 4:].float().mean((1, 2, 3))).long() + 2 * (x[:, 0, 0, 0] > 128)
    split = Memory(x, labels)
    return Dataset("made", tuple("abcd"), split, split, 3, (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)


def job_on(comm: Comm | None = None, *, parts: int = 1, techniques=(), dropout: float = 0.1, rule=None) -> Job:
    batches = loader(images(), "train", BATCH, seed=1, comm=comm, parts=parts)
    rule = rule or (lambda m: sgd(m, lr=0.1, momentum=0.9, weight_decay=1e-3))
    job = Job(Net(dropout=dropout), rule, loader=batches, comm=comm, accumulate=parts)
    return job.apply(Seeded(5), AllReduce(), *techniques)


def trained(comm: Comm | None = None, parts: int = 1, norm_batch: int = 8, more=(), **settings) -> Job:
    job = job_on(comm, parts=parts, techniques=[VirtualRanks(norm_batch), *more], **settings)
    train(job, 6)
    return job


def result(
    comm: Comm | None = None, parts: int = 1, norm_batch: int = 8, dropout: float = 0.1
) -> dict[str, torch.Tensor]:
    return weights(trained(comm, parts, norm_batch, dropout=dropout))


def test_four_virtual_ranks_are_four_ranks_bit_for_bit():
    """Dropout, BatchNorm's statistics and its running averages too: sums are taken in the same order."""
    alone = result(parts=4)
    for rank in Threads(4).run(result):
        assert_same(rank, alone)


def test_four_virtual_ranks_on_two_ranks():
    alone = result(parts=4)
    ranks = Threads(2).run(lambda comm: result(comm, parts=2))
    assert_same(*ranks)
    for name, x in alone.items():
        torch.testing.assert_close(ranks[0][name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.process
def test_four_virtual_ranks_are_four_gloo_processes():
    alone = result(parts=4)
    ranks = on_processes(4, result)
    for rank in ranks[1:]:
        assert_same(rank, ranks[0])
    for name, x in alone.items():
        torch.testing.assert_close(ranks[0][name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.process
@pytest.mark.smoke
def test_two_virtual_ranks_are_two_gloo_processes_bit_for_bit():
    """Of two numbers there is one order of summation."""
    alone = result(parts=2, norm_batch=16)
    for rank in on_processes(2, result, 1, 16):
        assert_same(rank, alone)


@pytest.mark.parametrize("parts", [1, 2])
def test_several_groups_in_one_forward(parts: int):
    one_by_one, together = result(parts=4, dropout=0.0), result(parts=parts, dropout=0.0)
    for name, x in one_by_one.items():
        torch.testing.assert_close(together[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_batch", [16, 32])
def test_a_group_that_spans_ranks(norm_batch: int):
    alone = result(parts=BATCH // norm_batch, norm_batch=norm_batch, dropout=0.0)
    ranks = Threads(4).run(lambda comm: result(comm, norm_batch=norm_batch, dropout=0.0))
    assert_same(*ranks[:2])
    for name, x in alone.items():
        torch.testing.assert_close(ranks[0][name], x, rtol=1e-4, atol=1e-5)


def test_a_norm_without_bias_in_a_group_that_spans_ranks():
    def gradients(comm: Comm | None = None) -> torch.Tensor:
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(3)
        norm.register_parameter("bias", None)
        images_of = loader(images(), "train", BATCH, comm=comm)
        job = Job(nn.Sequential(norm, nn.Flatten(), nn.Linear(3 * SIDE**2, 4)), sgd, loader=images_of, comm=comm)
        job.apply(AllReduce(), VirtualRanks(BATCH))
        x_NCHW, y_N = next(iter(job.loader))
        job.loss(job.model(x_NCHW), y_N).backward()
        grad = norm.weight.grad / (comm.size if comm else 1)
        return grad if comm is None else sum(comm.gather_objects(grad))

    alone = gradients()
    for rank in Threads(2).run(gradients):
        torch.testing.assert_close(rank, alone, rtol=1e-4, atol=1e-5)


def test_one_group_is_torchs_own_norm():
    plain = job_on(techniques=[], dropout=0.0)
    train(plain, 6)
    grouped = trained(norm_batch=BATCH, dropout=0.0)
    for name, x in weights(plain).items():
        torch.testing.assert_close(weights(grouped)[name], x, rtol=1e-5, atol=1e-6)
        if "running" not in name and "num" not in name:
            assert torch.equal(weights(grouped)[name], x)


class Activating(nn.BatchNorm2d):
    """As timm's: its own forward does more."""

    def forward(self, x):
        return super().forward(x).clamp(min=0)


@pytest.mark.parametrize("norm_batch", [8, 4])
def test_a_norm_that_also_activates_still_does_in_groups(norm_batch: int):
    plain, grouped, x = Activating(3), Activating(3), torch.randn(8, 3, 4, 4)
    job = Job(grouped, lambda m: sgd(m, lr=0.0), loader=[(x, x)], loss=functional.mse_loss)
    job.apply(VirtualRanks(norm_batch))
    out = job.model(x)
    wanted = torch.cat([plain(part) for part in x.split(norm_batch)])
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    out.sum().backward()
    job.optimizer.step()
    assert int(grouped.num_batches_tracked) == 1
    plain = Activating(3)
    plain(x)
    if norm_batch == 8:
        assert_same({"mean": grouped.running_mean}, {"mean": plain.running_mean})


def test_a_norm_that_never_calls_batch_norm_is_refused():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return x - x.mean()

    job = Job(Own(3), lambda m: sgd(m, lr=0.0), loader=[]).apply(VirtualRanks(4))
    with pytest.raises(InputError, match=r"Own cannot group images: .*calls torch's batch_norm"):
        job.model(torch.randn(8, 3, 4, 4))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_running_statistics_move_once_an_update_by_total_variance(dtype: torch.dtype, tolerance: float):
    batches = loader(images(), "train", BATCH, seed=1, parts=4, dtype=dtype)
    job = Job(Net(dropout=0.0).to(dtype), sgd, loader=batches, accumulate=4).apply(VirtualRanks(8))
    norm, conv = job.model.stage[0].norm, copy.deepcopy(job.model.stage[0].conv)
    x = next(iter(loader(images(), "train", BATCH, seed=1, dtype=dtype)))[0]
    train(job, 1)
    seen = conv(x).double()
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(
        norm.running_mean.double(), 0.1 * seen.mean((0, 2, 3)), rtol=tolerance, atol=0.01 * tolerance
    )
    torch.testing.assert_close(
        norm.running_var.double(), 0.9 + 0.1 * seen.var((0, 2, 3)), rtol=tolerance, atol=0.01 * tolerance
    )


def test_momentum_follows_the_updates_of_an_epoch():
    job = job_on(parts=4, techniques=[VirtualRanks(8, average=0.5)], dropout=0.0)
    before = job.model.stage[0].norm.running_var.clone()
    assert len(job.loader) == 16  # 4 updates of 4 parts
    x = torch.cat([x for x, _ in loader(images(), "train", BATCH, seed=1)][:1])
    variance = job.model.stage[0].conv(x).var((0, 2, 3))
    train(job, 1)
    share = momentum(0.5, 4)
    assert share == pytest.approx(0.3935, abs=1e-4)
    torch.testing.assert_close(
        job.model.stage[0].norm.running_var, before + share * (variance - before), rtol=1e-5, atol=0
    )


def test_norms_without_a_momentum_average_over_all_updates():
    job = job_on(techniques=[], dropout=0.0)
    for norm in (m for m in job.model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    job.apply(VirtualRanks(BATCH))
    train(job, 3)
    plain = job_on(techniques=[], dropout=0.0)
    for norm in (m for m in plain.model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    train(plain, 3)
    for name, x in weights(plain).items():
        torch.testing.assert_close(weights(job)[name], x, rtol=1e-5, atol=1e-6)


def test_averaged_weights_come_with_the_same_statistics():
    """EMA takes the statistics of each step after they have moved, as with torch's own norms."""
    plain, grouped = (job_on(techniques=[EMA(0.5), *more], dropout=0.0) for more in ([], [VirtualRanks(BATCH)]))
    for job in (plain, grouped):
        train(job, 4)
    for a, b in zip(judged_statistics(plain), judged_statistics(grouped), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_statistics_count_where_the_models_call_is_bypassed():
    found = []
    for bypassed in (False, True):
        job = job_on(parts=4, techniques=[VirtualRanks(8)], dropout=0.0)
        for number, (x_NCHW, y_N) in enumerate(job.loader, 1):
            job.backward(job.loss((job.model.forward if bypassed else job.model)(x_NCHW), y_N))
            if number % 4 == 0:
                job.optimizer.step()
                job.optimizer.zero_grad()
        found.append(weights(job))
    assert_same(*found)


# ---- recalibration


def judged_statistics(job: Job) -> list[torch.Tensor]:
    with job.evaluation() as model:
        return [x.clone() for name, x in model.named_buffers() if "running" in name]


def in_double(job: Job) -> list[torch.Tensor]:
    """The statistics over the whole set, layer by layer in float64; each norm uses its own groups of 8."""
    model, found = copy.deepcopy(job.model).double().eval(), []
    x = torch.cat([x for x, _ in loader(images(), "test", IMAGES)]).double()
    for block in model.stage:
        y = block.conv(x)
        found += [y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)]
        eps = block.norm.eps
        parts = [functional.batch_norm(p, None, None, training=True, eps=eps) for p in y.split(8)]
        wide = [w.view(1, -1, 1, 1) for w in (block.norm.weight, block.norm.bias)]
        x = (torch.cat(parts) * wide[0] + wide[1]).relu()
    return [x.detach() for x in found]


def statistics_of(comm: Comm | None = None, parts: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    job = trained(comm, parts=parts, more=[Recalibrate(images=0)])
    before = weights(job)
    measured = judged_statistics(job)
    assert_same(weights(job), before)
    return measured, in_double(job)


def test_recalibrated_statistics_are_those_of_the_whole_set():
    measured, exact = statistics_of()
    assert len(measured) == 4
    for a, b in zip(measured, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "size", "parts"), [("threads", 4, 1), pytest.param("processes", 2, 2, marks=pytest.mark.process)]
)
def test_recalibrated_statistics_have_the_same_bits_on_every_rank(where: str, size: int, parts: int):
    ranks = on_ranks(where, size, statistics_of, parts)
    for measured, _ in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(measured, ranks[0][0], strict=True))
    first, exact = ranks[0]
    assert torch.allclose(first[0].double(), exact[0], rtol=1e-5, atol=1e-6)  # the groups make no difference
    assert torch.allclose(first[1].double(), exact[1], rtol=1e-5, atol=1e-6)


def test_recalibration_does_not_change_training():
    plain, measured = (
        job_on(parts=4, techniques=[VirtualRanks(8)]),
        job_on(parts=4, techniques=[VirtualRanks(8), Recalibrate()]),
    )
    for job in (plain, measured):
        train(job, 6, each=lambda job=job: judged_statistics(job))
    assert_same(weights(plain), weights(measured))


def test_recalibration_left_out_shows_the_stale_averages():
    job = trained(parts=4, more=[Recalibrate()])
    fresh = judged_statistics(job)
    with job.evaluation(renew_statistics=False) as model:
        stale = [x.clone() for name, x in model.named_buffers() if "running" in name]
    assert not any(torch.equal(a, b) for a, b in zip(fresh, stale, strict=True))
    assert all(
        torch.equal(a, x)
        for a, (n, x) in zip(stale, [(n, x) for n, x in job.model.named_buffers() if "running" in n], strict=True)
    )


def test_recalibration_with_a_plain_iterable_and_new_weights():
    job = make(Recalibrate(images=40))
    first = judged_statistics(job)
    with torch.no_grad():
        job.model.stage[0].conv.weight.mul_(2)
    torch.testing.assert_close(judged_statistics(job)[0], 2 * first[0])


def test_each_update_is_measured_anew():
    """Also after torch's fused step, which does not mark the weights as changed."""
    job = trained(parts=4, more=[Recalibrate(images=0)])
    before = judged_statistics(job)
    train(job, 1)
    after = judged_statistics(job)
    fresh = job_on(parts=4, techniques=[VirtualRanks(8), Recalibrate(images=0)])
    fresh.model.load_state_dict(job.model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(after, judged_statistics(fresh), strict=True))
    assert not torch.equal(before[0], after[0])


PAIRS = [(1, 129), (2, 129), (4, 129), (4, 130), (2, 133), (1, 150)]
OTHER_PAIRS = [(1, 130), (2, 130), (1, 133), (4, 133), (2, 150), (4, 150)]


@pytest.mark.parametrize(
    ("ranks", "images_measured"), [*PAIRS, *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in OTHER_PAIRS)]
)
def test_any_number_of_images_is_measured(ranks: int, images_measured: int):
    """Also a remainder of one image, or of fewer than there are ranks, and norms of one pixel."""

    def measured(comm: Comm) -> list[torch.Tensor]:
        batches = loader(images(), "train", BATCH, seed=1, comm=comm)
        head = nn.Sequential(nn.Conv2d(3, 4, SIDE), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
        torch.manual_seed(0)
        for p in head.parameters():
            nn.init.normal_(p)
        job = Job(head, sgd, loader=batches, comm=comm).apply(Recalibrate(images_measured))
        found = judged_statistics(job)
        x = torch.cat([x for x, _ in loader(images(), "test", IMAGES)])[:images_measured]
        y = job.model[0](x).double()
        torch.testing.assert_close(found[0].double(), y.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1].double(), y.var((0, 2, 3), correction=0), rtol=1e-5, atol=1e-6)
        return found

    results = Threads(ranks).run(measured)
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


def test_a_frozen_norm_keeps_its_statistics():
    job = trained(parts=4, more=[Recalibrate(images=0)])
    job.model.stage[0].norm.eval()
    own = job.model.stage[0].norm.running_mean.clone()
    found = judged_statistics(job)
    assert torch.equal(found[0], own)
    assert not torch.equal(found[2], job.model.stage[1].norm.running_mean)


def test_a_write_to_the_weights_is_seen_through_data_too():
    job = trained(parts=4, more=[Recalibrate(images=0)])
    first = judged_statistics(job)
    job.model.stage[0].conv.weight.data.mul_(2)
    torch.testing.assert_close(judged_statistics(job)[0], 2 * first[0])


def test_recalibration_without_images_is_refused():
    job = Job(Net(), sgd(Net(), lr=0.1)).apply(Recalibrate())
    with pytest.raises(InputError, match=r"no image came from the job's loader: give Job\(loader=...\)"):
        judged_statistics(job)


def test_a_generator_is_refused():
    job = make(Recalibrate())
    job.loader = iter([])
    with pytest.raises(InputError, match="passed over only once"):
        judged_statistics(job)


# ---- bad input


@pytest.mark.parametrize(
    ("norm_batch", "parts", "line"),
    [
        (-1, 1, "norm_batch=-1: at least 0; 0 takes all images of a forward"),
        (5, 1, "batch=32: not a multiple of norm_batch=5"),
        (64, 1, "batch=32: not a multiple of norm_batch=64"),
        (32, 4, "a part of the batch has 8 images on a device, and a group cannot span"),
        (12, 2, "batch=32: not a multiple of norm_batch=12"),
    ],
)
def test_groups_that_do_not_fit(norm_batch: int, parts: int, line: str):
    with pytest.raises(InputError, match=line):
        trained(norm_batch=norm_batch, parts=parts)


def test_parts_and_accumulation_must_agree():
    batches = loader(images(), "train", BATCH, parts=4)
    with pytest.raises(InputError, match=r"loader\.parts=4 beside Job\(accumulate=1\)"):
        Job(Net(), sgd, loader=batches).apply(VirtualRanks(8))


def test_a_step_before_all_parts_is_refused():
    job = job_on(parts=4, techniques=[VirtualRanks(8)])
    x_NCHW, y_N = next(iter(job.loader))
    job.loss(job.model(x_NCHW), y_N).backward()
    with pytest.raises(InputError, match="after 1 of 4 virtual ranks of this device: step once every 4 batches"):
        job.optimizer.step()


def test_a_group_that_would_span_ranks_in_parts_is_refused():
    with pytest.raises(InputError, match="a part of the batch has 8 images on a device, and a group cannot span"):
        Threads(2).run(lambda comm: trained(comm, parts=2, norm_batch=16))


def test_ranks_that_do_not_make_up_a_group():
    with pytest.raises(InputError, match="times a divisor of 4"):
        Threads(4).run(three_ranks)


def three_ranks(comm: Comm) -> Job:
    job = Job(Net(), sgd, loader=[(torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long))], comm=comm)
    job.apply(VirtualRanks(24))
    train(job, 1)
    return job
