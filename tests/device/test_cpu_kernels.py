"""kasoku's C kernels for CPUs with AVX-512 bf16: their results, and which layers take them."""

import copy
import pickle
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from kasoku.core import Job
from kasoku.device import Autocast, ChannelsLast, Compile, CpuKernels, cpu_kernels
from kasoku.device.cpu_kernels import suits_winograd, weight_gradient, winograd
from kasoku.memory import SavedMemory
from kasoku.models import cifarnet
from kasoku.optim import sgd

LAST = torch.channels_last
on_avx512 = pytest.mark.skipif(cpu_kernels.library() is None, reason="no AVX-512 bf16 here, or no C compiler")


@pytest.fixture(autouse=True)
def _threads_are_put_back():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pays(monkeypatch):
    """As on a processor without AMX."""
    monkeypatch.setattr(cpu_kernels, "pays", lambda threads: True)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().to(memory_format=LAST)


def shapes(count: int):
    """Convolutions of many kinds: (layer, input). Of the first three, the work is cut into several parts."""
    for images, channels_in, channels, side in ((67, 70, 130, 6), (41, 200, 199, 7), (33, 8, 8, 4)):
        yield nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), bf16(images, channels_in, side, side)
    draw = random.Random(0)
    for _ in range(count):
        kernel, stride = ((draw.choice(sizes), draw.choice(sizes)) for sizes in ((1, 2, 3, 5, 7), (1, 1, 2, 3)))
        padding = tuple(draw.randrange(size + 1) for size in kernel)
        channels_in, channels = draw.choice((1, 3, 6, 17, 24, 64, 70, 130)), draw.choice((1, 5, 16, 24, 64, 96, 129))
        size = [side + draw.choice((0, 1, 8, 39)) for side in kernel]
        layer = nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False)
        yield layer, bf16(draw.choice((1, 2, 3, 5, 8, 17)), channels_in, *size)


@on_avx512
def test_weight_gradients_are_sums_of_exact_products_on_any_number_of_threads():
    torch.manual_seed(0)
    for layer, x_NCHW in shapes(60):
        with torch.no_grad():
            dy_NCHW = torch.randn_like(layer(x_NCHW.float())).bfloat16().to(memory_format=LAST)
        exact = torch.nn.grad.conv2d_weight(
            x_NCHW.double(), layer.weight.shape, dy_NCHW.double(), layer.stride, layer.padding
        )
        torch.set_num_threads(1)
        dw = weight_gradient(x_NCHW, dy_NCHW, layer)
        assert (dw - exact).abs().max() <= 3e-6 * exact.abs().max(), layer
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(weight_gradient(x_NCHW, dy_NCHW, layer), dw), layer


def error_of(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@on_avx512
def test_winograd_has_a_small_error_and_the_same_bits_on_any_number_of_threads():
    torch.manual_seed(0)
    draw = random.Random(0)
    for _ in range(40):
        channels = [draw.choice((1, 5, 16, 24, 64, 70, 130)) for _ in range(2)]
        padding, side = draw.randrange(3), [draw.choice((3, 4, 7, 15, 16, 31)) for _ in range(2)]
        layer, x_NCHW = nn.Conv2d(*channels, 3, 1, padding), bf16(draw.choice((1, 2, 5, 17)), channels[0], *side)
        weight = layer.weight.detach().bfloat16()
        bias = layer.bias.detach() if draw.random() < 0.5 else None
        exact = functional.conv2d(
            x_NCHW.double(), weight.double(), None if bias is None else bias.double(), padding=padding
        )
        dy_NCHW = torch.randn_like(exact).bfloat16().to(memory_format=LAST)
        exact_dx = torch.nn.grad.conv2d_input(x_NCHW.shape, weight.double(), dy_NCHW.double(), padding=padding)
        of_threads = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, dx = winograd(x_NCHW, weight, bias, padding), winograd(dy_NCHW, weight, None, padding, dx=True)
            of_threads.append((y, dx))
        assert error_of(y, exact) < 0.006, (layer, x_NCHW.shape)
        assert error_of(dx, exact_dx) < 0.006, (layer, x_NCHW.shape)
        for other in of_threads[:2]:
            assert all(map(torch.equal, other, (y, dx))), (layer, x_NCHW.shape)


def test_winograd_is_for_3x3_with_stride_1_many_channels_and_full_tiles():
    x_NCHW = torch.empty(64, 24, 8, 8)
    assert all(suits_winograd(nn.Conv2d(24, 24, 3, padding=pad), x_NCHW) for pad in (0, 1, 2))
    others = [
        nn.Conv2d(24, 24, 5, padding=2), nn.Conv2d(24, 24, 3, 2), nn.Conv2d(24, 24, 3, padding=3),
        nn.Conv2d(24, 24, 3, padding=(0, 1)), nn.Conv2d(24, 23, 3), nn.Conv2d(23, 24, 3),
    ]  # fmt: skip
    assert not any(suits_winograd(layer, x_NCHW) for layer in others)
    layer = nn.Conv2d(24, 24, 3)
    maps = torch.empty(999, 24, 5, 5), torch.empty(1, 24, 8, 8), torch.empty(999, 24, 1, 1)
    assert not any(suits_winograd(layer, x_NCHW) for x_NCHW in maps)


@on_avx512
def test_winograd_loses_digits_on_a_map_far_from_zero():
    torch.manual_seed(0)
    x_NCHW, weight = bf16(4, 64, 16, 16) + 4, bf16(64, 64, 3, 3)
    exact = functional.conv2d(x_NCHW.double(), weight.double(), padding=1)
    assert error_of(winograd(x_NCHW, weight, None, 1), exact) < 0.02


@on_avx512
def test_gelu_of_every_bf16_number_and_its_slope_are_within_1e_6_and_a_rounding():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every.view(1, 64, 32, 32).clone(memory_format=LAST).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    layer, exact = nn.GELU(), functional.gelu(exact_x)
    out = cpu_kernels._gelu(layer, x)
    assert type(out.grad_fn).__name__ == "_GeluBackward"
    out.backward(torch.ones_like(out))
    exact.backward(torch.ones_like(exact))
    assert torch.equal(out.isnan(), functional.gelu(x.detach()).isnan())
    assert x.grad[x.isnan()].isnan().all()
    finite = x.isfinite() & exact.isfinite()
    for ours, theirs in ((out, exact), (x.grad, exact_x.grad)):
        error = (ours.double() - theirs).abs()[finite]
        assert (error <= 1e-6 + 2**-8 * theirs.abs()[finite]).all()


@on_avx512
@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (2, 64, 31, 31), (4, 24, 7, 5), (1, 1, 2, 3)])
def test_max_pools_have_torch_s_bits_with_equal_values_and_nan(shape: tuple[int, ...]):
    layer = nn.MaxPool2d(2)
    for values in (torch.randn(shape), torch.randint(-1, 2, shape) * -0.0, torch.randint(0, 3, shape).float()):
        values[0, 0, 0, 0] = float("nan")
        ours, theirs = (values.bfloat16().to(memory_format=LAST).requires_grad_() for _ in range(2))
        out, expected = cpu_kernels._pool(layer, ours), layer(theirs)
        assert type(out.grad_fn).__name__ == "_PoolBackward"
        dy = torch.randn_like(expected)
        out.backward(dy)
        expected.backward(dy)
        assert torch.equal(*(y.nan_to_num(9).view(torch.int16) for y in (out, expected)))
        assert torch.equal(ours.grad, theirs.grad)


def counted_winograd(monkeypatch) -> list[bool]:
    """Whether each call of `winograd` from now on is for the gradient of an input."""
    calls = []

    def count(*args, dx: bool = False) -> torch.Tensor:
        calls.append(dx)
        return winograd(*args, dx=dx)

    monkeypatch.setattr(cpu_kernels, "winograd", count)
    return calls


def by_c(module: nn.Module) -> bool:
    """Whether the forward of a module is one of CpuKernels."""
    return getattr(vars(module).get("forward"), "__module__", None) == cpu_kernels.__name__


def trained(*techniques, steps: int = 3) -> tuple[Job, list[torch.Tensor]]:
    """A job after some steps, and the gradients of the last one."""
    torch.manual_seed(0)
    job = Job(cifarnet(10, 3, widths=(16, 32)), partial(sgd, lr=0.01)).apply(ChannelsLast(), *techniques)
    x_NCHW, y_N = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for _ in range(steps):
        job.optimizer.zero_grad()
        job.backward(job.loss(job.model(x_NCHW), y_N))
        gradients = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
        job.optimizer.step()
    return job, gradients


@on_avx512
@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize(("by_winograd", "limit"), [(False, 1.1), (True, 1.25)])
def test_gradients_are_almost_as_close_to_float32_as_torch_s_in_bf16(by_winograd: bool, limit: float, monkeypatch):
    if not by_winograd:
        monkeypatch.setattr(cpu_kernels, "suits_winograd", lambda layer, x_NCHW: False)
    calls = counted_winograd(monkeypatch)
    (_, exact), (_, theirs), (job, ours) = (
        trained(steps=1),
        trained(Autocast(), steps=1),
        trained(Autocast(), CpuKernels(), steps=1),
    )
    assert {type(m) for m in job.model.modules() if by_c(m)} == {nn.Conv2d, nn.GELU, nn.MaxPool2d}
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    of_ours, of_theirs = (
        sum(float((a - b).norm() / b.norm()) for a, b in zip(some, exact, strict=True)) for some in (ours, theirs)
    )
    assert of_ours <= limit * of_theirs
    assert calls == ([False, True] if by_winograd else [])
    job.close()
    assert not any("forward" in vars(m) for m in job.model.modules())


class Odd(nn.Module):
    """A convolution with a bias that is called twice, by position and by keyword, and the other two layers."""

    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv = nn.Conv2d(3, 24, 3, padding=4), nn.Conv2d(24, 24, 3, padding=1)
        self.gelu, self.pool = nn.GELU(), nn.MaxPool2d(2)
        self.to(memory_format=layout)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """The mean over pixels."""
        x_NCHW = self.pool(input=self.gelu(input=self.conv(self.stem(x_NCHW))))
        return self.gelu(self.conv(input=x_NCHW)).mean((2, 3))


def gradients(model: nn.Module, around, *, times: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    x_NCHW = torch.linspace(-2, 2, 8 * 3 * 13 * 13).view(8, 3, 13, 13).contiguous(memory_format=LAST)
    with torch.autocast("cpu", torch.bfloat16), around():
        loss = (model(x_NCHW).float() ** 2).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)
    return [p.grad for p in model.parameters()]


@on_avx512
@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("around", [nullcontext, partial(torch.autograd.graph.save_on_cpu, pin_memory=True)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_layer_may_be_called_in_any_way(layout: torch.memory_format, around, threads: int):
    torch.set_num_threads(threads)
    expected = gradients(Odd(layout), nullcontext, times=2)
    job = Job(Odd(layout), partial(sgd, lr=0.01)).apply(CpuKernels())
    assert all(by_c(m) for m in job.model.children())
    ours = gradients(job.model, around, times=2)
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
        assert a.stride() == b.stride()
    again = pickle.loads(pickle.dumps(job.model))
    assert not any("_" in vars(m).get("forward", m.forward).__name__ for m in again.modules())
    assert all(map(torch.equal, gradients(copy.deepcopy(job.model), around), gradients(job.model, around)))


@on_avx512
@pytest.mark.usefixtures("pays")
def test_a_wide_layer_of_many_channels_gets_its_weight_gradient_from_torch(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "weight_gradient", None)
    calls = counted_winograd(monkeypatch)
    torch.manual_seed(0)
    layer, x_NCHW = nn.Conv2d(72, 80, 3, padding=1), torch.randn(2, 72, 20, 20).contiguous(memory_format=LAST)
    expected, ours = [], []
    for out, around in ((expected, nullcontext()), (ours, torch.autocast("cpu", torch.bfloat16))):
        x_NCHW.requires_grad_().grad = None
        layer.zero_grad()
        with around:
            y_NCHW = cpu_kernels._conv(layer, x_NCHW)
        (y_NCHW.float() ** 2).sum().backward()
        out += [y_NCHW.detach().float(), x_NCHW.grad, layer.weight.grad, layer.bias.grad]
    assert calls == [False, True]
    for a, b in zip(ours, expected, strict=True):
        assert error_of(a, b) < 0.01


@on_avx512
@pytest.mark.usefixtures("pays")
def test_torch_counts_what_its_kernels_compute():
    job, _ = trained(Autocast(), CpuKernels(), steps=1)
    flops = []
    for around in (nullcontext, cpu_kernels.torch_kernels):
        with FlopCounterMode(display=False) as counter, around():
            job.backward(job.loss(job.model(torch.randn(4, 3, 32, 32)), torch.zeros(4, dtype=torch.long)))
        flops.append(counter.get_total_flops())
    assert flops[0] < 0.8 * flops[1], flops


def test_one_image_without_a_batch_goes_to_torch(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "pays", lambda threads: True)
    job = Job(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.MaxPool2d(2)), partial(sgd, lr=0.1)).apply(CpuKernels())
    with torch.autocast("cpu", torch.bfloat16):
        assert job.model(torch.randn(3, 8, 8)).shape == (4, 3, 3)


@on_avx512
@pytest.mark.usefixtures("pays")
def test_it_changes_no_bit_in_float32_and_no_layer_that_another_technique_runs(capsys):
    assert all(map(torch.equal, trained()[1], trained(CpuKernels())[1]))
    saved = SavedMemory(factor=1, show=False)
    job, _ = trained(Autocast(), saved, CpuKernels(), steps=1)
    planned = [m for m in job.model.modules() if "saved_memory" in vars(m)]
    assert planned
    assert not any(map(by_c, planned))
    job, _ = trained(Autocast(), Compile(backend="eager"), CpuKernels(), steps=1)
    assert not any(map(by_c, job.model.modules()))
    assert "CpuKernels: the kernels of compiled blocks are the compiler's" in capsys.readouterr().err
