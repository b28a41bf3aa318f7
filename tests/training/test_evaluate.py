"""Test-time averaging and scores, against plain arithmetic."""

import math

import pytest
import torch
from torch import nn

from kasoku.training.evaluation import averaged, evaluate


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(7)).eval()


def test_mirror_is_the_mean_of_both_sides(model):
    x = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        wanted = (model(x) + model(x.flip(3))) / 2
        torch.testing.assert_close(averaged(model, x, "mirror"), wanted)
        torch.testing.assert_close(averaged(model, x, "plain"), model(x))


def test_crops_change_only_the_unsure_and_to_the_mean_of_six_views(model):
    x = torch.randn(20, 3, 8, 8)
    with torch.no_grad():
        plain, mirror, crops = (averaged(model, x, views) for views in ("plain", "mirror", "crops"))
        changed = ~torch.isclose(plain, crops, rtol=1e-5, atol=1e-6).all(1)
        lead = plain.softmax(1).topk(2, dim=1).values.diff(dim=1).abs()[:, 0]
        assert changed.sum() == 6  # 30 % of 20
        assert lead[changed].max() <= lead[~changed].min()
        i = int(changed.nonzero()[0])
        padded = nn.functional.pad(x[i : i + 1], (1, 1, 1, 1), mode="reflect")
        views = [padded[:, :, :8, :8], padded[:, :, 2:, 2:]]
        shifted = sum(model(v) + model(v.flip(3)) for v in views) / 4
        torch.testing.assert_close(crops[i], (mirror[i] + shifted[0]) / 2, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(averaged(model, x[i : i + 1], "crops")[0], crops[i], rtol=1e-5, atol=1e-6)


def test_where_no_image_can_be_decoded_there_is_no_accuracy(model):
    scores = evaluate(model, [(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64))])
    assert (scores.top1, scores.images) == (0, 0)
    assert math.isnan(scores.loss)


def test_scores_are_those_of_a_slow_count(model):
    batches = [(torch.randn(n, 3, 8, 8), torch.randint(7, (n,))) for n in (6, 6, 3)]
    with torch.no_grad():
        scores = evaluate(model, batches)
        outs = torch.cat([model(x) for x, _ in batches])
    y = torch.cat([y for _, y in batches])
    assert scores.images == 15
    assert scores.top1 == pytest.approx(sum(int(o.argmax()) == int(t) for o, t in zip(outs, y, strict=True)) / 15)
    assert scores.top5 == pytest.approx(sum(int(t) in o.topk(5).indices for o, t in zip(outs, y, strict=True)) / 15)
    assert scores.loss == pytest.approx(float(nn.functional.cross_entropy(outs, y)), rel=1e-5)
