"""What the techniques of one device do, beyond the contracts."""

import pytest
import torch
from torch import nn

from contracts import Batches, Net, make, rule, train, weights
from contracts import one_thread as one_thread
from kasoku.core import InputError, Job, Threads
from kasoku.device import Autocast, ChannelsLast, Compile, Graphs, LossScale, Seeded
from kasoku.optim import Clip


def test_autocast_computes_in_half_precision_and_returns_float32():
    seen = []
    job = make(Autocast("bf16"))
    job.model.stage[1].conv.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    out = job.model(job.loader.batches[0][0])
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}


def test_autocast_returns_structures_in_float32():
    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "parts": (y, [y.argmax(1)]), "none": None}

    job = Job(Two(2, 3), rule).apply(Autocast())
    out = job.model(torch.randn(4, 2))
    assert out["y"].dtype == out["parts"][0].dtype == torch.float32
    assert out["parts"][1][0].dtype == torch.int64
    assert out["none"] is None


def test_channels_last_keeps_the_parameters_and_their_values():
    model = Net()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    job = make(ChannelsLast(), model=model)
    for n, p in job.model.named_parameters():
        assert id(p) == before[n][0]
        assert torch.equal(p, before[n][1])
        assert p.ndim != 4 or p.is_contiguous(memory_format=torch.channels_last)
    train(job, 1)
    out = []
    job.model.stage[1].conv.register_forward_hook(lambda m, args, y: out.append(y))
    job.model(job.loader.batches[0][0])
    assert out[0].is_contiguous(memory_format=torch.channels_last)


def test_channels_last_lays_out_the_state_an_optimizer_has_already():
    model = Net()
    plain = make(model=model, optimizer=rule(model))
    train(plain, 2)
    optimizer = plain.optimizer
    plain.close()
    make(ChannelsLast(), model=model, optimizer=optimizer)
    for p in model.parameters():
        assert optimizer.state[p]["momentum_buffer"].stride() == p.stride()


def test_compiled_blocks_keep_names_and_gradients_arrive_block_by_block():
    order: list[str] = []
    job = make(Compile(backend="aot_eager"), model=Net(dropout=0))
    names = {p: n for n, p in job.model.named_parameters()}
    assert list(names.values()) == [n for n, _ in Net().named_parameters()]
    job.gradient_ready(lambda p: order.append(names[p].rpartition(".conv")[0] or names[p].split(".")[0]))
    job.model.stage[1].register_full_backward_hook(lambda *_: order.append("stage.1 done"))
    x, y = job.loader.batches[0]
    job.loss(job.model(x), y).backward()
    assert order.index("head") < order.index("stage.1 done") < order.index("stage.0")


def test_a_model_of_one_layer_is_compiled_as_a_whole():
    job = Job(nn.Linear(2, 2), rule).apply(Compile(backend="eager"))
    assert hasattr(vars(job.model)["forward"].__func__, "_torchdynamo_orig_callable")


def test_many_blocks_of_one_class_share_the_limit_of_64():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2 + i, 3 + i), nn.ReLU()) for i in range(12)))
    job = Job(model, rule).apply(Compile(backend="eager"))
    counts = torch._dynamo.utils.counters
    before = counts["frames"]["ok"]
    job.model(torch.randn(2, 2))
    assert counts["frames"]["ok"] - before == 12  # every one compiled, none left to Python


def test_an_unknown_backend_is_refused():
    with pytest.raises(InputError, match=r'backend="inductr": one of .*inductor'):
        Compile(backend="inductr")


def test_loss_scale_leaves_the_loss_and_scales_its_gradient():
    job = make(LossScale(start=8.0))
    out = torch.zeros(2, 4, requires_grad=True)
    loss = job.loss(out, torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item())
    loss.backward()
    assert out.grad[0, 0].item() == pytest.approx(8 * (0.25 - 1) / 2)


def test_a_step_that_overflows_is_left_out_and_the_scale_falls_then_grows():
    job = make(LossScale(start=4.0, every=2))
    before = weights(job)
    for p in job.model.parameters():
        p.grad = torch.ones_like(p)
    job.model.head.bias.grad[0] = float("inf")
    job.optimizer.step()
    after = weights(job)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert job.steps == 1
    assert job.state_dict()["kept"]["loss_scale"] == {"scale": 2.0, "good": 0}
    train(job, 2)
    assert job.state_dict()["kept"]["loss_scale"] == {"scale": 4.0, "good": 0}


@pytest.mark.parametrize("order", [0, 1])
def test_clipping_sees_unscaled_gradients_in_whatever_order_they_are_given(order: int):
    techniques = [LossScale(start=1024.0), Clip(norm=0.01)]
    job = make(*(reversed(techniques) if order else techniques))
    norms = []
    job.after_update(lambda params: norms.append(torch.cat([p.grad.flatten() for p in params]).norm().item()))
    train(job, 2)
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)


@pytest.mark.filterwarnings("ignore:nothing averages")
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all():
    def rank(comm):
        job = make(LossScale(start=4.0), comm=comm)
        for p in job.model.parameters():
            p.grad = torch.full_like(p, float("nan") if comm.rank == 1 else 1.0)
        before = weights(job)
        job.optimizer.step()
        after = weights(job)
        return job.state_dict()["kept"]["loss_scale"]["scale"], all(torch.equal(before[k], after[k]) for k in before)

    assert Threads(3).run(rank) == [(2.0, True)] * 3


def draws(job: Job, batches: int, *, step_every: int = 1) -> list[float]:
    """What dropout would draw for each of the next batches."""
    found: list[float] = []
    while len(found) < batches:
        for i, _ in enumerate(job.loader):
            found.append(torch.rand(1).item())
            if (i + 1) % step_every == 0:
                job.optimizer.step()
            if len(found) == batches:
                break
    return found


@pytest.mark.filterwarnings("ignore:nothing averages")
def test_seeded_draws_depend_on_seed_step_batch_and_rank_alone():
    whole = draws(make(Seeded(seed=1)), 9)
    assert len(set(whole)) == 9
    job = make(Seeded(seed=1))
    draws(job, 5)
    resumed = make(Seeded(seed=1))
    resumed.load_state_dict(job.state_dict())
    torch.manual_seed(1234)
    assert draws(resumed, 4) == whole[5:]
    assert not set(draws(make(Seeded(seed=2)), 9)) & set(whole)
    ranks = Threads(2).run(lambda comm: draws(make(Seeded(seed=1), comm=comm), 3))
    assert ranks[0] == whole[:3]
    assert not set(ranks[0]) & set(ranks[1])


def test_seeded_draws_differ_within_an_accumulated_step():
    found = draws(make(Seeded(), accumulate=2), 8, step_every=2)
    assert len(set(found)) == 8


def test_graphs_off_cuda_are_refused():
    with pytest.raises(InputError, match="Graphs needs a model on CUDA, this one is on cpu"):
        make(Graphs())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("autocast", [False, True])
def test_graphs_train_as_the_plain_loop_does(autocast: bool):
    found = []
    for techniques in ([], [Graphs()]):
        model = Net(dropout=0).cuda()
        loader = [(x.cuda(), y.cuda()) for x, y in Batches().batches]
        job = Job(model, rule, loader=loader).apply(*([Autocast()] if autocast else []), *techniques)
        train(job, 6)
        found.append(weights(job))
        job.close()
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: Autocast("fp8"), 'dtype="fp8": "bf16" or "fp16"'),
        (lambda: LossScale(factor=1.0), "factor=1.0"),
        (lambda: Seeded(seed=-1), "seed=-1: 0 or more"),
    ],
)
def test_a_setting_outside_its_range_is_one_line(wrong, line: str):
    with pytest.raises(InputError, match=line):
        wrong()
