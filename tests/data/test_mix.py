"""Mix: what is done to images and what the loss makes of it agree to the pixel; nothing else is changed."""

from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from contracts import Net, make, train, weights
from contracts import one_thread as one_thread
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.data import LowResolution, Mix, digits, loader
from kasoku.device import LossScale
from kasoku.optim import sgd

BOTH, MIXUP, CUTMIX = Mix(0.5, 1.0), Mix(0.5, 0.0), Mix(0.0, 1.0)
every_kind = pytest.mark.parametrize("mix", [BOTH, MIXUP, CUTMIX], ids=["both", "mixup", "cutmix"])


def marked(batches: int = 4, images: int = 8, side: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images that can be told after mixing: image i is 1 in channel i and 0 elsewhere; labels shuffled."""
    x_NCHW = torch.eye(images)[:, :, None, None].expand(images, images, side, side)
    generator = torch.Generator().manual_seed(0)
    return [(x_NCHW.clone(), torch.randperm(images, generator=generator)) for _ in range(batches)]


def parts_NN(x_NCHW: torch.Tensor) -> torch.Tensor:
    """How much of image j (column) is in image i of a batch of marked ones."""
    return x_NCHW.double().mean((2, 3))


def by_hand(outputs_NK: torch.Tensor, x_NCHW: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """The loss that the images themselves ask for: of each label as much as there is of its image."""
    log_NN = outputs_NK.log_softmax(1)[:, y_N]  # of image i under the label of image j
    return -(parts_NN(x_NCHW).float() * log_NN).sum(1).mean()


def job_on(batches, mix: Mix, *others, **settings) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(batches[0][0].shape[1], 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Job(model, sgd, loader=batches, **settings).apply(mix, *others)


def passes(job: Job, epochs: int):
    """Batches of so many epochs, each followed by a step."""
    for _ in range(epochs):
        for x, y in job.loader:
            yield x, y
            job.loss(outputs := job.model(x), y)
            outputs.sum().backward()
            job.optimizer.step()


@every_kind
def test_the_loss_is_that_of_both_images_by_their_share_of_the_picture(mix: Mix):
    job = job_on(marked(), mix)
    for x, y in passes(job, 4):
        torch.testing.assert_close(job.loss(job.model(x), y), by_hand(job.model(x), x, y))


def own_or_not(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """1 for the labels 0, 1, 2, ... in this order, else 0: a loss that shows the share it is weighted by."""
    return torch.tensor(float(torch.equal(y, torch.arange(len(y)))), dtype=torch.float64)


def test_the_share_of_the_loss_is_exactly_what_the_box_has_left():
    x_NCHW, _ = marked(1)[0]
    job = job_on([(x_NCHW, torch.arange(8))] * 10, CUTMIX, loss=own_or_not)
    seen = set()
    for x, y in passes(job, 8):
        left = int(x[0, 0].sum())
        assert torch.equal(x.sum((2, 3)).diagonal(), torch.full((8,), float(left)))
        assert job.loss(None, y).item() == 1 - (144 - left) / 144
        gone = x[0, 0] == 0
        assert gone.sum() == gone.any(0).sum() * gone.any(1).sum(), "what is the partner's is one box"
        seen.add(left)
    assert len(seen) > 20
    assert min(seen) < 40


@every_kind
def test_each_image_has_one_other_as_partner_and_is_one_partner(mix: Mix):
    for x, _ in passes(job_on(marked(), mix), 10):
        other_NN = parts_NN(x) - parts_NN(x).diagonal().diag()
        if other_NN.any():
            assert torch.equal((other_NN > 0).sum(0), torch.ones(8).long())
            assert torch.equal((other_NN > 0).sum(1), torch.ones(8).long())
    assert {mix.draw(np.random.default_rng(i), 8, (12, 12)).shift for i in range(200)} == set(range(1, 8))


def test_shares_of_mixup_have_the_mean_and_variance_of_their_distribution():
    shares = np.array([MIXUP.draw(np.random.default_rng(i), 16, (8, 8)).share for i in range(4000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.5 + 1)), abs=0.01)


def test_cutmix_boxes_lie_inside_reach_every_pixel_and_come_half_the_time():
    pairings = [BOTH.draw(np.random.default_rng(i), 16, (20, 30)) for i in range(4000)]
    boxes = [p.box for p in pairings if p.box]
    assert len(boxes) == pytest.approx(2000, abs=130)  # four standard deviations
    hit_HW = np.zeros((20, 30))
    for top, bottom, left, right in boxes:
        assert 0 <= top <= bottom <= 20
        assert 0 <= left <= right <= 30
        hit_HW[top:bottom, left:right] += 1
    assert hit_HW.min() > 200
    np.testing.assert_allclose(hit_HW, hit_HW[::-1, ::-1], atol=150)  # no side is preferred
    assert np.mean([p.share for p in pairings if p.box]) > 0.5  # half without what lies outside


@every_kind
def test_under_accumulation_each_part_is_mixed_within_itself(mix: Mix):
    job = job_on(marked(), mix, accumulate=2)
    seen = set()
    for number, (x, y) in enumerate(job.loader):
        loss = job.loss(job.model(x), y)
        torch.testing.assert_close(loss, by_hand(job.model(x), x, y))
        seen.add(tuple(parts_NN(x).flatten().tolist()))
        (loss / 2).backward()
        if number % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()
    assert len(seen) == 4


def batches_of(mix: Mix, comm: Comm | None = None, parts: int = 1, steps: int = 3) -> list[tuple[torch.Tensor, ...]]:
    """What the loop gets of the digits, and the loss of it under a fixed model."""
    source = loader(digits(), "train", 96, seed=4, comm=comm, parts=parts)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.constant_(model[1].weight, 0.1)
    nn.init.zeros_(model[1].bias)
    job = Job(model, lambda m: sgd(m, lr=0.0), loader=source, comm=comm, accumulate=parts).apply(mix)
    out = []
    for number, (x, y) in enumerate(islice(iter(job.loader), steps * parts), start=1):
        loss = job.loss(job.model(x), y)
        loss.backward()
        out.append((x, y, loss.detach()))
        if number % parts == 0:
            job.optimizer.step()
    return out


@pytest.mark.filterwarnings("ignore:nothing averages")
def test_accumulated_parts_are_mixed_as_ranks_would():
    alone = batches_of(BOTH, parts=2)
    ranks = Threads(2).run(lambda comm: batches_of(BOTH, comm))
    for step in range(3):
        for rank in range(2):
            for ours, theirs in zip(alone[2 * step + rank], ranks[rank][step], strict=True):
                assert torch.equal(ours, theirs)


@every_kind
def test_evaluation_is_not_mixed(mix: Mix):
    job, plain = make(mix), make()
    train(job, 3)
    plain.model.load_state_dict(weights(job))
    x, y = plain.loader.batches[0]
    with job.evaluation() as model, plain.evaluation() as same:
        assert torch.equal(job.loss(model(x), y), plain.loss(same(x), y))


def test_training_on_labels_of_ones_own_is_refused():
    job = make(BOTH)
    x, y = next(iter(job.loader))
    job.loss(job.model(x), y)
    for labels in (y.clone(), y[:], job.plain_loader.batches[0][1]):
        with pytest.raises(InputError, match=r"labels that job\.loader did not hand out.*as they come"):
            job.loss(job.model(x), labels)


@every_kind
def test_batches_taken_ahead_keep_their_own_partners(mix: Mix):
    job = job_on(marked(), mix)
    for x, y in list(job.loader)[::-1]:
        torch.testing.assert_close(job.loss(job.model(x), y), by_hand(job.model(x), x, y))


def test_a_loader_left_early_goes_on_as_if_it_were_not():
    def taken(leave: int) -> list[torch.Tensor]:
        source = loader(digits(), "train", 96, seed=4)
        job = Job(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), lambda m: sgd(m, lr=0.0), loader=source).apply(BOTH)
        out = []
        while len(out) < 6:
            for x, y in job.loader:
                out.append(x)
                job.loss(job.model(x), y).backward()
                job.optimizer.step()
                if len(out) == leave:
                    break
        return out

    for a, b in zip(taken(99), taken(3), strict=True):
        assert torch.equal(a, b)


def test_draws_follow_the_loaders_seed_and_leave_every_generator_alone():
    def shares(seed: int) -> list[float]:
        source, y_N = loader(digits(), "train", 96, seed=seed), torch.arange(96)
        zeros = torch.zeros(96, 8, 8, 1).byte()
        source.executor.run = lambda _, epoch, numbers, trace: (
            (zeros, y_N, y_N) for _ in zip(range(3), numbers, strict=False)
        )
        job = Job(nn.Flatten(), sgd, loader=source, loss=own_or_not).apply(MIXUP)
        return [job.loss(None, y).item() for _, y in job.loader]

    states = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    assert shares(0) == shares(0)
    assert len({*shares(0), *shares(1), *shares(-1)}) == 9
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


@every_kind
def test_the_host_never_waits_for_the_device(mix: Mix):
    """Tensors without values cannot be asked for any."""
    x, y = torch.empty(8, 3, 16, 16, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    job = Job(nn.Flatten(), sgd, loader=[(x, y)] * 20).apply(mix)
    assert all(x.shape == (8, 3, 16, 16) and job.loss(x.flatten(1), y).ndim == 0 for x, y in job.loader)


@every_kind
def test_memory_order_and_source_stay_as_they_are(mix: Mix):
    batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in marked()]
    kept = [x.clone() for x, _ in batches]
    job = job_on(batches, mix)
    for x, y in passes(job, 2):
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert y.dtype == torch.int64
    assert all(torch.equal(x, before) for (x, _), before in zip(batches, kept, strict=True))


def test_images_alone_and_no_images_pass_as_they_are():
    one, none = (torch.rand(1, 3, 8, 8), torch.tensor([2])), (torch.rand(0, 3, 8, 8), torch.zeros(0).long())
    job, plain = make(BOTH), make()
    job.loader._inner = [one, none]
    (x, y), (x_none, _) = job.loader
    assert torch.equal(x, one[0])
    assert len(x_none) == 0
    assert torch.equal(job.loss(job.model.eval()(x), y), plain.loss(job.model(x), y))


def test_it_works_beside_shrinking_and_loss_scaling():
    job = job_on(marked(), BOTH, LowResolution(4, until=1.0), LossScale(start=1024.0))
    for _ in range(3):
        for x, y in job.loader:
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    assert job.steps == 12


def test_vectors_can_be_laid_over_each_other_but_not_cut():
    batches = [(torch.rand(4, 5), torch.arange(4))]
    assert next(iter(Job(nn.Linear(5, 4), sgd, loader=batches).apply(MIXUP).loader))[0].shape == (4, 5)
    with pytest.raises(InputError, match=r"cutmix=1\.0: for images \(N, C, H, W\), a batch here has 2 dimensions"):
        next(iter(Job(nn.Linear(5, 4), sgd, loader=batches).apply(CUTMIX).loader))


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
@pytest.mark.parametrize("alpha", [-0.1, float("inf"), float("nan")])
def test_impossible_alphas_are_refused(name: str, alpha: float):
    with pytest.raises(InputError, match=rf"{name}={alpha}: at least 0"):
        Mix(**{name: alpha})


def test_mixing_is_a_fair_trade_of_training_loss():
    """The same network fits mixed images less well, and still tells the plain ones."""
    job, plain = make(MIXUP, model=Net(dropout=0)), make(model=Net(dropout=0))
    assert sum(train(job, 40)[-8:]) > sum(train(plain, 40)[-8:])
    x, y = (torch.cat(parts) for parts in zip(*plain.loader.batches, strict=True))
    with job.evaluation() as model:
        assert (model(x).argmax(1) == y).float().mean() > 0.9
