"""Recipes to tune, and a search that finds a planted batch at once."""

from pathlib import Path

import pytest

from kasoku.core import Job
from kasoku.training import auto_batch
from kasoku.tune import BatchSizeResult, Measurement

FOLDER = Path(__file__).parent.parent.parent / "recipes"
DIGITS, MLPERF = FOLDER / "digits_cnn_98.toml", FOLDER / "imagenet_resnet50_mlperf.toml"
SMALL = """
epochs = 1
batch = 64
model = {use = "kasoku.models.cifarnet", widths = [8, 16]}
data = {use = "kasoku.data.digits"}
optimizer = {use = "kasoku.optim.sgd", lr = 0.1, momentum = 0.9}
device = {precision = "fp32", threads = 1}
"""
POINTS = """
[[points]]
batch = 32
epochs = 1.0
optimizer = {lr = 0.1}

[[points]]
batch = 128
epochs = 2.0
optimizer = {lr = 0.2}
"""


def planted(monkeypatch: pytest.MonkeyPatch, batch: int, **more: object) -> list[dict[str, object]]:
    """Has tuning find this batch at once; gives what it was asked for."""
    asked: list[dict[str, object]] = []

    def tune_batch_size(job: Job, strategy: object, **given: object) -> BatchSizeResult:
        asked.append({"strategy": strategy, "accumulate": job.accumulate, **given})
        samples = (
            Measurement(8, failed="out of memory"),
            Measurement(batch, 0.01, 0.009, 0.011, 0.001, 0.8),
        )
        return BatchSizeResult(batch, samples, "as planted", 0.5, strategy="TimeToTarget", budget_s=60.0, **more)

    monkeypatch.setattr(auto_batch, "tune_batch_size", tune_batch_size)
    return asked
