"""SavedMemory(host=True) on a real GPU: copies on a stream of their own, and what they save."""

import gc

import pytest
import torch

from kasoku.core import Job
from kasoku.device import Autocast, ChannelsLast
from kasoku.memory import SavedMemory, network
from kasoku.models.resnet import Bottleneck, ResNet
from kasoku.optim import sgd
from memory.nets import images, plain_chain
from memory.test_bf16 import planner_of, vgg
from memory.test_host import away_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

NETWORKS = {
    "chain": plain_chain,
    "vgg": vgg,
    "bottlenecks": lambda: ResNet(Bottleneck, (2, 1, 1, 1), 4, 3, "imagenet", False),
}


@pytest.fixture(autouse=True)
def _same_kernels():
    torch.manual_seed(0)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def batch(n: int, side: int):
    x, y = images(n, side)
    return x.cuda().contiguous(memory_format=torch.channels_last), y.cuda()


def job_of(make, *techniques) -> Job:
    torch.manual_seed(0)
    return Job(make().cuda(), lambda m: sgd(m, 0.01)).apply(ChannelsLast(), *techniques)


def step(job: Job, x, y) -> None:
    job.loss(job.model(x), y).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def host(**settings) -> SavedMemory:
    return SavedMemory(**{"factor": 1, "host": True, "in_backward": False, "show": False, **settings})


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("beside", [[], [Autocast("bf16")]], ids=["", "autocast"])
def test_weights_are_those_of_plain_pytorch_bit_for_bit(name, beside, monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(2))
    x, y = batch(64, 64)
    jobs = [job_of(NETWORKS[name], *beside, *more) for more in ([], [host(lossless=True)])]
    for job in jobs:
        for _ in range(5):
            step(job, x, y)
    states = [job.model.state_dict() for job in jobs]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_the_host_never_waits(monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(2))
    x, y = batch(64, 64)
    job = job_of(vgg, host(lossless=True))
    step(job, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(job, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak(job: Job, x, y) -> int:
    """Bytes that were there at most in a job's third step, over those before it."""
    for _ in range(2):
        step(job, x, y)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(job, x, y)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("bf16", [False, True])
def test_the_peak_is_foreseen(bf16, monkeypatch):
    """To a tenth of what plain PyTorch takes: cuDNN's own room is not foreseen."""
    monkeypatch.setattr(network, "choices", away_only(2))
    x, y = batch(256, 96)
    plain = peak(job_of(vgg), x, y)
    ours = job_of(vgg, host(bf16=bf16))
    measured = peak(ours, x, y)
    foreseen = planner_of(ours).chosen.peak - planner_of(ours).network.around.fixed
    assert measured < 0.7 * plain
    assert abs(foreseen - measured) < 0.1 * plain


def test_an_aborted_step_leaves_nothing(monkeypatch):
    monkeypatch.setattr(network, "choices", away_only(2))
    x, y = batch(64, 64)
    job = job_of(vgg, host(lossless=True))
    step(job, x, y)
    free = sum(map(len, planner_of(job).host.free.values()))
    before = torch.cuda.memory_allocated()

    def stops(gradient):
        raise RuntimeError("stopped")

    loss = job.loss(job.model(x), y)
    del loss
    hook = job.model[5].weight.register_hook(stops)
    with pytest.raises(RuntimeError, match="stopped"):
        job.loss(job.model(x), y).backward()
    hook.remove()
    job.optimizer.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    assert sum(map(len, planner_of(job).host.free.values())) == free
    assert torch.cuda.memory_allocated() <= before
