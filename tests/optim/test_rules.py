"""The rules against torch's own and against their definitions."""

import pytest
import torch
from torch import nn

from contracts import Net, make, rule, train
from contracts import one_thread as one_thread
from kasoku.config.toml import Factory
from kasoku.core import Constant, InputError
from kasoku.core.job import Job
from kasoku.optim import Muon, Rate, SGDSettings, adamw, cross_entropy, muon, sgd
from kasoku.optim.muon import orthogonalize
from kasoku.optim.param_groups import split


@pytest.mark.parametrize("make_rule", [sgd, adamw])
def test_biases_and_norms_do_not_decay(make_rule):
    model = Net()
    names = {p: n for n, p in model.named_parameters()}
    decays = {names[p]: g["weight_decay"] for g in make_rule(model, weight_decay=0.1).param_groups for p in g["params"]}
    assert {n for n, d in decays.items() if d} == {"stage.0.conv.weight", "stage.1.conv.weight", "head.weight"}
    assert decays.keys() == set(names.values())
    (one,) = make_rule(model, weight_decay=0.0).param_groups
    assert len(one["params"]) == len(names)


def test_parameters_that_the_model_exempts_do_not_decay():
    model = Net()
    model.no_weight_decay = lambda: {"head.weight"}
    assert model.head.weight in set(split(model)[1])
    assert model.stage[0].conv.weight in set(split(model)[0])


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_refused():
    model = Net()
    model.stage[0].requires_grad_(False)
    for make_rule in (sgd, adamw, muon):
        params = [p for g in make_rule(model).param_groups for p in g["params"]]
        assert set(params) == {p for p in model.parameters() if p.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(InputError, match="Net has no parameter with requires_grad=True"):
        sgd(model)


def test_sgd_and_adamw_are_fused_where_torch_has_it():
    assert sgd(Net()).defaults["fused"]
    assert adamw(Net()).defaults["fused"]
    assert not sgd(Net().to("meta")).defaults["fused"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_formula(nesterov: bool):
    model = nn.Linear(3, 2, bias=False).double()
    w = model.weight.detach().clone()
    v = torch.zeros_like(w)
    optimizer = sgd(model, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    for _ in range(3):
        g = torch.randn_like(w)
        model.weight.grad = g.clone()
        optimizer.step()
        g = g + 0.01 * w
        v = 0.9 * v + g
        w = w - 0.1 * (g + 0.9 * v if nesterov else v)
    torch.testing.assert_close(model.weight.detach(), w, rtol=1e-12, atol=1e-12)


def test_muon_moves_filters_by_an_orthogonal_matrix():
    torch.manual_seed(0)
    for shape in [(16, 40), (40, 16), (16, 31), (16, 24)]:
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), 5))
        assert values.min() > 0.6
        assert values.max() < 1.3


@pytest.mark.parametrize("steps", [3, 5])
def test_muon_is_the_formula(steps: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 4, bias=False))
    conv, head = model[0].weight, model[2].weight
    optimizer = muon(
        model, lr=0.2, momentum=0.6, steps=steps, rest=SGDSettings(head_lr=0.5, momentum=0.85, weight_decay=0.01)
    )
    w, h = conv.detach().double(), head.detach().double()
    vw, vh = torch.zeros_like(w), torch.zeros_like(h)
    for _ in range(3):
        gw, gh = torch.randn_like(conv), torch.randn_like(head)
        conv.grad, head.grad = gw.clone(), gh.clone()
        optimizer.step()
        vw = 0.6 * vw + gw.double()
        x = (gw.double() + 0.6 * vw).reshape(8, 27)
        x = x / x.norm()
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w * 8**0.5 / w.norm() - 0.2 * x.reshape(w.shape)
        g = gh.double() + 0.01 / 0.5 * h  # the head loses a hundredth of itself at each step
        vh = 0.85 * vh + g
        h = h - 0.5 * (g + 0.85 * vh)
    torch.testing.assert_close(conv.detach().double(), w, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.detach().double(), h, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 10])
@pytest.mark.parametrize("columns", [8, 15, 64])
def test_orthogonalize_of_nearly_one_row_is_as_in_float64(steps: int, columns: int):
    torch.manual_seed(0)
    x = torch.randn(8, 1) @ torch.randn(1, columns) + 1e-6 * torch.randn(8, columns)
    y = x.double() / x.double().norm()
    for _ in range(steps):
        a = y @ y.T
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    largest = torch.linalg.matrix_norm(y, ord=2).item()
    found = orthogonalize(x, steps)
    assert found.isfinite().all()
    assert torch.linalg.matrix_norm(found, ord=2).item() == pytest.approx(largest, rel=0.05)


def test_muon_sorts_parameters_into_filters_biases_whitening_and_head():
    model = Net()
    model.whitening = nn.Conv2d(3, 12, 2)
    model.whitening.weight.requires_grad_(False)
    names = {p: n for n, p in model.named_parameters()}
    rest = SGDSettings(bias_lr=3.0, head_lr=5.0, weight_decay=0.3, decay_all=True, whitening_epochs=2)
    groups = muon(model, lr=0.24, rest=rest).param_groups
    found = [({names[p] for p in g["params"]}, g["lr"], g["filters"], g.get("until", 0)) for g in groups]
    norms = {f"stage.{i}.norm.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert found == [
        ({"stage.0.conv.weight", "stage.1.conv.weight"}, 0.24, True, 0),
        (norms | {"head.bias"}, 3.0, False, 0),
        ({"whitening.bias"}, 3.0, False, 2),
        ({"head.weight"}, 5.0, False, 0),
    ]
    assert [g["weight_decay"] for g in groups[1:]] == pytest.approx([0.1, 0.1, 0.06])
    assert "until" not in [k for g in muon(model).param_groups for k in g]


def test_whitening_stands_still_after_its_epochs():
    model = Net()
    model.whitening = nn.Conv2d(3, 12, 2)
    optimizer = muon(model, rest=SGDSettings(bias_lr=0.5, whitening_epochs=1))
    job = make(Rate(Constant()), model=model, optimizer=lambda _: optimizer)
    rates = []
    train(job, 5, each=lambda: rates.append(optimizer.param_groups[2]["lr"]))
    assert rates == [0.375, 0.25, 0.125, 0.0, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.24


def test_muon_learns_the_toy_problem():
    job = make(optimizer=lambda m: muon(m, lr=0.1, rest=SGDSettings(bias_lr=0.1, head_lr=0.1)))
    losses = train(job, 24)
    assert sum(losses[-4:]) < 0.3 * sum(losses[:4])


def test_muon_takes_its_settings_from_a_recipe():
    made = Factory("kasoku.optim.muon", {"lr": 1, "rest": {"head_lr": 2}})(Net())
    assert isinstance(made, Muon)
    assert made.param_groups[-1]["lr"] == 2


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: sgd(Net(), lr=-1), "lr=-1: at least 0"),
        (lambda: sgd(Net(), momentum=1), "momentum=1: at least 0 and below 1"),
        (lambda: sgd(Net(), momentum=0, nesterov=True), "nesterov=true with momentum=0"),
        (lambda: sgd(Net(), lr=float("nan")), "lr=nan: at least 0"),
        (lambda: adamw(Net(), betas=(0.9, 1.0)), r"betas=\(0\.9, 1\.0\): at least 0 and below 1"),
        (lambda: muon(Net(), steps=0), "steps=0: at least 1 and at most 10; Newton-Schulz iterations"),
        (lambda: muon(nn.Linear(2, 2)), "Linear has no trainable weights beside its head"),
        (lambda: SGDSettings(weight_decay=2), "weight_decay=2: at least 0 and below 1"),
        (
            lambda: cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), smoothing=1.0),
            r"smoothing=1\.0: at least 0 and below 1",
        ),
        (lambda: muon(Net()).step(lambda: 0.0), "closure"),
    ],
)
def test_a_setting_outside_its_range_is_one_line(wrong, line: str):
    with pytest.raises(InputError, match=line) as error:
        wrong()
    assert "\n" not in str(error.value)


def test_cross_entropy_is_the_formula_in_float32():
    torch.manual_seed(0)
    z_NK, y_N = torch.randn(5, 7), torch.randint(7, (5,))
    for smoothing in (0.0, 0.1):
        wanted = nn.functional.one_hot(y_N, 7) * (1 - smoothing) + smoothing / 7
        loss = -(wanted * z_NK.log_softmax(1)).sum(1).mean()
        torch.testing.assert_close(cross_entropy(z_NK, y_N, smoothing=smoothing), loss)
        torch.testing.assert_close(Factory("kasoku.optim.cross_entropy", {"smoothing": smoothing})(z_NK, y_N), loss)
    torch.testing.assert_close(cross_entropy(z_NK, nn.functional.one_hot(y_N, 7).float()), cross_entropy(z_NK, y_N))
    assert cross_entropy(z_NK.bfloat16(), y_N).dtype == torch.float32


def test_rate_multiplies_every_group_by_the_schedule_of_progress():
    from kasoku.core import Linear

    model = Net()
    optimizer = torch.optim.SGD([{"params": [model.head.weight], "lr": 2.0}, {"params": [model.head.bias]}], lr=1.0)
    job = Job(model, optimizer, loader=make().loader).apply(Rate(Linear(epochs=2)))
    seen = [[g["lr"] for g in job.hyper()]]
    train(job, 3, each=lambda: seen.append([g["lr"] for g in job.hyper()]))
    assert seen == [[2, 1], [1.75, 0.875], [1.5, 0.75], [1.25, 0.625]]
    optimizer.add_param_group({"params": [model.stage[0].conv.weight]})
    with pytest.raises(InputError, match=r"add groups before job.apply"):
        train(job, 1)


def test_rates_are_those_of_the_progress_after_loading_a_checkpoint():
    from kasoku.core import Linear

    first = make(Rate(Linear(epochs=2)), optimizer=rule)
    train(first, 3)
    second = make(Rate(Linear(epochs=2)), optimizer=rule)
    second.load_state_dict(first.state_dict())
    assert second.hyper()[0]["lr"] == first.hyper()[0]["lr"] == pytest.approx(0.1 * (1 - 3 / 8))
    second.close()
    assert second.hyper()[0]["lr"] == 0.1


def test_a_group_whose_time_is_over_is_frozen_and_thawed_by_close():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[0].parameters()), "until": 1.0}, {"params": list(model[1].parameters())}]
    x, y = torch.randn(6, 4), torch.zeros(6).long()
    job = Job(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), loader=[(x, y)] * 2).apply(Rate(Constant()))
    seen = []
    for _ in range(2):
        for a, b in job.loader:
            before = model[0].weight.detach().clone()
            job.loss(job.model(a), b).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            seen.append((not before.equal(model[0].weight), model[0].weight.requires_grad))
    assert seen == [(True, True), (True, False), (False, False), (False, False)]
    job.close()
    assert model[0].weight.requires_grad


def test_outputs_that_are_no_logits_are_named_by_their_shape():
    with pytest.raises(InputError, match=r"returns \[2, 10, 4, 4\]: one tensor of logits, \(N, K\), is wanted"):
        cross_entropy(torch.zeros(2, 10, 4, 4), torch.zeros(2, dtype=torch.long))
