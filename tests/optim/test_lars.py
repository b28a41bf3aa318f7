"""LARS against its published forms, written out for one tensor in float64, in each of the ways it is computed."""

import sys
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from contracts import Net, assert_same, make, through_a_file, train, weights
from contracts import one_thread as one_thread
from helpers.published_lars import (
    BIG,
    FORMS,
    SIZES,
    Tensors,
    advance,
    assert_near,
    check,
    moved,
    random_grads,
)
from kasoku.config.toml import Factory
from kasoku.core import InputError, Linear
from kasoku.optim import LARS, Rate, Trust, lars
from kasoku.optim.lars.foreach import LIBRARY

PATHS = ("cpu", "foreach", "triton")
RATE = 300.0  # with eta .001 a step is about a third of the weights, so that float32 weights show the step itself

every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):
    """A function that has LARS computed in one of the ways; Triton's kernels run in its interpreter."""

    def choose(path: str) -> None:
        if path == "cpu" and LIBRARY is None:
            pytest.skip("kasoku was installed without a C compiler")
        if path == "triton":
            pytest.importorskip("triton", reason="triton is not installed")
            from triton.runtime.interpreter import InterpretedFunction

            from kasoku.optim.lars import triton as lars_triton

            for kernel in ("_squares", "_trusts", "_move"):
                monkeypatch.setattr(lars_triton, kernel, InterpretedFunction(getattr(lars_triton, kernel).fn))
        monkeypatch.setattr(sys.modules["kasoku.optim.lars.lars"], "_path", lambda device: path)

    return choose


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, use) -> str:
    use(request.param)
    return request.param


# ---- the forms


def test_two_steps_by_hand(path: str):
    # |w| = 5, |g| = 10, no decay: trust is .001 * 5 / 10 = .0005; the second gradient is 0, so its trust is 1.
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    grads = [[torch.tensor([[6.0, 8.0]])], [torch.zeros(1, 2)]]
    moved(model, grads, [200.0, 200.0], momentum=0.5, weight_decay=0.0)
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[3 - 0.6 - 0.3, 4 - 0.8 - 0.4]]))


def ends(rates: list[float]) -> list[Tensor]:
    models = [Tensors((64,), (10,)) for _ in FORMS]
    for form, model in zip(FORMS, models, strict=True):
        moved(model, random_grads(model, len(rates)), rates, trust=Trust(form=form, eta=0.1))
    return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]


def test_the_forms_agree_while_the_rate_is_constant(path: str):
    for a, b in pairwise(ends([0.5] * 3)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_rate_that_moves_parts_mlperf_from_the_others_until_it_was_zero(path: str):
    a, b, c = ends([0.2, 1.0, 0.5])
    torch.testing.assert_close(b, c, rtol=1e-6, atol=1e-6)
    assert (a - b).norm() > 0.01 * a.norm()
    a, b, c = ends([0.0, 1.0, 0.5])
    assert (c - b).norm() > 0.01 * b.norm()  # b still has the first gradient, c has not


@every_form
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_every_form_is_as_published_at_rates_that_move(path: str, form: str, decoupled: bool, nesterov: bool):
    trust = Trust(form=form, decoupled=decoupled, eps=1e-3)
    check(Tensors((7, 2049), (64,)), [RATE, 0.3 * RATE, 2 * RATE], trust=trust, nesterov=nesterov, weight_decay=0.01)


@every_form
def test_a_rate_that_is_zero_or_tiny_for_a_while(path: str, form: str):
    check(Tensors((7, 2049), (64,)), [0.0, RATE, 0.0, 1e-20, RATE], trust=Trust(form=form), weight_decay=0.01)


def test_weights_or_gradients_of_zero_have_a_trust_of_one(path: str):
    model = Tensors((64, 64))
    with torch.no_grad():
        model.all[0].zero_()
    grads = [[torch.full((1, 64), 2.0), torch.zeros(1, 64)]]
    before = model.all[1].detach().clone()
    moved(model, grads, [0.5], weight_decay=0.1)
    assert model.all[0].eq(-1.0).all()
    torch.testing.assert_close(model.all[1].detach(), before * (1 - 0.5 * 0.1))


@pytest.mark.parametrize("size", [1e-25, 1e18])
def test_norms_whose_squares_leave_float32(path: str, size: float):
    check(Tensors((64, 2049)), [RATE, RATE], size=size, weight_decay=0.0)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_a_gradient_that_is_not_finite_is_seen_in_the_weights(path: str):
    model = Tensors((64,))
    moved(model, [[torch.full((1, 64), float("inf"))]], [1.0])
    assert not model.all[0].isfinite().any()


# ---- sizes, dtypes, layouts


def test_ragged_sizes(path: str):
    check(Tensors(SIZES, SIZES[:6]), [RATE, 0.5 * RATE])


def test_millions_of_elements(path: str):
    check(Tensors((BIG // 5 if path == "triton" else BIG,)), [RATE])  # the interpreter is slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision(path: str, dtype: torch.dtype):
    check(Tensors((7, 2049, 4096), (64,)), [RATE, 0.5 * RATE], dtype=dtype)


def test_weights_of_half_and_of_double_precision(path: str):
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        check(Tensors((2049, 4096), dtype=dtype), [RATE, RATE], dtype, tolerance)


def test_memory_in_any_order(path: str):
    for order in (torch.preserve_format, torch.contiguous_format):
        torch.manual_seed(0)
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last))
        model.turned = nn.Parameter(torch.randn(5, 9).t())
        model.gaps = nn.Parameter(torch.randn(4, 10)[:, ::2])
        start = [p.detach().clone() for p in model.parameters()]
        grads = [[torch.randn_like(p, memory_format=order) for p in start] for _ in range(2)]
        moved(model, grads, [RATE, RATE])
        assert_near(model, start, grads, [RATE, RATE])


def test_biases_and_norms_have_neither_trust_nor_decay():
    model = Net()
    names = {p: n for n, p in model.named_parameters()}
    groups = lars(model, weight_decay=0.1).param_groups
    found = {names[p]: (g["layerwise"], g["weight_decay"]) for g in groups for p in g["params"]}
    layers = {"stage.0.conv.weight", "stage.1.conv.weight", "head.weight"}
    assert found == {name: (True, 0.1) if name in layers else (False, 0.0) for name in names.values()}


def test_frozen_parameters_stay(path: str):
    model = Tensors((7, 64), (8,))
    model.all[0].requires_grad_(False)
    params = [p for g in lars(model).param_groups for p in g["params"]]
    assert [p is q for p, q in zip(params, model.all[1:], strict=True)] == [True, True]
    optimizer = lars(Tensors((7,)))
    optimizer.step()  # without a gradient: nothing to do
    assert not optimizer.state


# ---- beside the rest of the house


@pytest.mark.parametrize(("form", "nesterov"), [("mlperf", False), ("pytorch", False), ("mxnet", True)])
def test_two_halves_are_the_whole_step_bit_for_bit(path: str, form: str, nesterov: bool):
    def run(halves: bool) -> dict[str, Tensor]:
        job = make(Rate(Linear(epochs=2)), optimizer=lambda m: lars(m, nesterov=nesterov, trust=Trust(form=form)))
        for x_NCHW, y_N in list(job.loader)[:2]:
            torch.manual_seed(0)
            job.loss(job.model(x_NCHW), y_N).backward()
            params = list(job.model.parameters())
            if halves:
                for part in (params[::2], params[1::2]):
                    job.update(part)
                for p in params:
                    p.grad = None
            job.optimizer.step()
            job.optimizer.zero_grad()
        return weights(job)

    assert_same(run(halves=True), run(halves=False))


@pytest.mark.skipif(LIBRARY is None, reason="kasoku was installed without a C compiler")
def test_the_number_of_threads_changes_no_bit():
    def run(threads: int) -> Tensors:
        model = Tensors((BIG // 10, 2049), (64,))
        torch.set_num_threads(threads)
        moved(model, random_grads(model, 2), [RATE, RATE])
        return model

    before = torch.get_num_threads()
    try:
        one, *others = (run(threads) for threads in (1, 2, 7))
    finally:
        torch.set_num_threads(before)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one.all, other.all, strict=True))


@pytest.mark.skipif(LIBRARY is None, reason="kasoku was installed without a C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="torch may have another OpenMP than GNU's")
def test_several_threads_share_a_step():
    assert LIBRARY.kasoku_lars_step(None, None, 0, 3) == 3


def test_a_buffer_follows_its_weights_to_another_dtype(path: str):
    def run(dtype: torch.dtype) -> Tensors:
        model = Tensors((300,), (64,)).to(dtype)
        optimizer = lars(model, lr=0.1, momentum=0.9)
        for now in (dtype, torch.float32):
            model.to(now)
            for p in model.parameters():
                p.grad = torch.ones_like(p) / 8
            optimizer.step()
        return model

    for a, b in zip(run(torch.bfloat16).all, run(torch.float32).all, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_a_buffer_of_another_shape_is_refused(path: str):
    model = Tensors((300,), (64,))
    optimizer = lars(model, lr=0.1)
    p = next(model.parameters())
    p.grad = torch.ones_like(p)
    optimizer.state[p]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"momentum_buffer of shape \(3,\)"):
        optimizer.step()


def test_a_run_that_was_saved_goes_on_bit_for_bit(path: str):
    def start():
        model = Net(dropout=0.0).to(memory_format=torch.channels_last)
        return make(Rate(Linear(epochs=2)), model=model, optimizer=lambda m: lars(m, trust=Trust(form="mxnet")))

    whole, first, second = start(), start(), start()
    train(whole, 4)
    train(first, 2)
    second.model.load_state_dict(through_a_file(first.model.state_dict()))
    second.load_state_dict(through_a_file(first.state_dict()))
    train(second, 2)
    assert_same(weights(second), weights(whole))


@every_form
@pytest.mark.parametrize(("before", "after"), [("cpu", "foreach"), ("cpu", "triton"), ("foreach", "cpu")])
def test_a_run_goes_on_in_another_way_and_layout(use, form: str, before: str, after: str):
    rates, settings = [RATE, 0.4 * RATE, 0.2 * RATE, 0.3 * RATE], {"trust": Trust(form=form), "weight_decay": 0.01}
    model = nn.Conv2d(6, 8, 3)
    start = [p.detach().clone() for p in model.parameters()]
    grads = random_grads(model, 4)
    use(before)
    first = moved(model, grads[:2], rates[:2], **settings)
    use(after)
    model.to(memory_format=torch.channels_last)
    second = lars(model, **settings)
    second.load_state_dict(through_a_file(first.state_dict()))
    for some, lr in zip(grads[2:], rates[2:], strict=True):
        advance(second, model, some, lr)
    assert_near(model, start, grads, rates, **settings)


def test_a_write_to_the_weights_from_outside_is_noticed_through_data_too(path: str):
    model = Tensors((2049, 4096))
    grads = random_grads(model, 2)
    optimizer = moved(model, grads[:1], [RATE], momentum=0.0)
    for p in model.parameters():
        p.data.mul_(3)
    start = [p.detach().clone() for p in model.parameters()]
    advance(optimizer, model, grads[1], RATE)
    assert_near(model, start, grads[1:], [RATE], momentum=0.0)


def test_autograd_notices_the_step_and_gradients_are_left_as_they_were(path: str):
    model = Tensors((2049,), (64,))
    versions, grads = [p._version for p in model.parameters()], random_grads(model, 1)
    moved(model, grads, [RATE], nesterov=True)
    for p, g, version in zip(model.parameters(), grads[0], versions, strict=True):
        assert p.grad.equal(g)
        assert p._version > version


def test_a_decoupled_decay_follows_the_schedule():
    job = make(Rate(Linear(epochs=2)), optimizer=lambda m: lars(m, lr=2.0, trust=Trust(decoupled=True)))
    train(job, 4)
    assert job.hyper()[0]["weight_decay"] == pytest.approx(5e-5 / 2)


def test_lars_learns_the_toy_problem():
    losses = train(make(optimizer=lambda m: lars(m, lr=0.1, trust=Trust(eta=0.2))), 24)
    assert sum(losses[-4:]) < 0.3 * sum(losses[:4])


def test_lars_takes_its_settings_from_a_recipe():
    made = Factory("kasoku.optim.lars", {"lr": 1, "trust": {"form": "mxnet", "eps": 1e-9}})(Net())
    assert isinstance(made, LARS)
    assert (made.param_groups[0]["form"], made.param_groups[0]["eps"]) == ("mxnet", 1e-9)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: lars(Net(), lr=-1), "lr=-1: at least 0"),
        (lambda: lars(Net(), weight_decay=-1e-4), "weight_decay=-0.0001: at least 0"),
        (lambda: lars(Net(), momentum=1), "momentum=1: at least 0 and below 1"),
        (lambda: lars(Net(), momentum=0, nesterov=True), "nesterov=true with momentum=0"),
        (lambda: lars(Net().requires_grad_(False)), "Net has no parameter with requires_grad=True"),
        (lambda: Trust(eta=-1), "eta=-1: at least 0"),
        (lambda: Trust(eps=float("nan")), "eps=nan: at least 0"),
        (lambda: Trust(form="nvidia"), 'form="nvidia": "mlperf", "pytorch" or "mxnet"'),
        (lambda: lars(Net()).step(lambda: 0.0), "closure"),
    ],
)
def test_a_setting_outside_its_range_is_one_line(wrong, line: str):
    with pytest.raises(InputError, match=line) as error:
        wrong()
    assert "\n" not in str(error.value)


# ---- what a GPU would see


def test_nothing_is_read_back_to_the_host():
    model = Tensors((7, 64), (8,)).to("meta")  # where a value that is read is an error
    grads = [[torch.empty_like(p) for p in model.parameters()]] * 2
    optimizer = moved(model, grads, [1.0, 0.5], nesterov=True)
    assert len(optimizer.state) == 3


def test_as_many_launches_for_322_tensors_as_for_161(use, monkeypatch: pytest.MonkeyPatch):
    use("triton")
    from kasoku.optim.lars import triton as lars_triton

    counts = []
    for tensors in (161, 322):
        launches: list[int] = []
        kernel = defaultdict(lambda seen=launches: lambda *args, **meta: seen.append(1))  # by its grid
        for name in ("_squares", "_trusts", "_move"):
            monkeypatch.setattr(lars_triton, name, kernel)
        model = Tensors((8, 16) * (tensors // 4) + (24,), (32,) * (tensors - 2 * (tensors // 4) - 1))
        moved(model, random_grads(model, 1), [1.0])
        counts.append(len(launches))
    assert counts == [3, 3]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_cuda_with_accesses_of_16_bytes(capability: int, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kasoku.optim.lars import triton as lars_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tl = triton.language
    kinds = {"table": "*i64", "owner": "*i64", "first": "*i64", "n": "i32", "layers": "i32"}
    values = {"W": tl.float32, "G": tl.float32, "BLOCK": 4096, "CHUNK": 512}
    if not isinstance(lars_triton._move, triton.runtime.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: there is no compiler")
    for kernel in (lars_triton._squares, lars_triton._trusts, lars_triton._move):
        for full in (True, False):
            constants = {k: v for k, v in {**values, "FULL": full}.items() if k in kernel.arg_names}
            signature = {k: "constexpr" if k in constants else kinds.get(k, "*fp64") for k in kernel.arg_names}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            if "FULL" in constants:
                assert ("ld.global.v4" in made.asm["ptx"]) == full
