"""Does LARS hold the accuracy at 16 times the batch?

    python benchmarks/large_batch.py [--data FOLDER] [--full | --tune]

Fashion-MNIST, a network of four convolutions, 32 epochs each: `base` (SGD with Nesterov momentum, batch 256), `sgd_16x`
(the same rule at batch 4,096, 15 updates an epoch) and `lars_16x` (LARS at 4,096): top-1 of the 10,000 test images in
points, the mean over seeds. Batch 4,096 is 16 virtual ranks of 256 images. lars_gap = base - lars_16x (bound: at most
0.5); lars_minus_sgd = lars_16x - sgd_16x (bound: at least -0.2).
Network, augmentation, loss, warm-up, shape of the decay, recalibration and number of epochs are the same for all three.
All settings tried are in the JSON. Of those tried for 32 epochs the best on 10,000 held-out training images was chosen
(`--tune` tries them all again, on 50,000 images, so 13 updates an epoch: about three hours). With shifts of up to 2
pixels 300 updates were too few for all that the images then show; with none they were learnt by heart.
The last batch of an epoch is filled, so the sides at 4,096 see 61,440 images an epoch, the base 60,160.
Default: 1 seed; --full: 3. Also written: docs/large_batch.svg, top-1 and rate over the epochs.
Result: records/. Why it matters: a batch spread over thousands of devices must not cost accuracy, and a rule
of its own for it must be worth having (Nado et al. 2021, arXiv 2102.06356: well-tuned Nesterov keeps up with LARS).
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common import finish, parse
from kasoku.core import Cosine, Job
from kasoku.data import Augment, Dataset, Memory, fashion_mnist, loader
from kasoku.device import Device, choose
from kasoku.distributed import Recalibrate, VirtualRanks
from kasoku.models import cnn4
from kasoku.optim import Rate, Trust, cross_entropy, lars, sgd
from kasoku.training.evaluation import evaluate

EPOCHS = 32
NORM_BATCH, LARGE = 256, 4096
SMOOTHING, TRANSLATE, RECALIBRATE = 0.1, 1, 10_000
HELD_OUT, TEST_BATCH, EVERY = 10_000, 500, 4  # the curve has a point each EVERY epochs
SIDES = ("base", "sgd_16x", "lars_16x")
CLAIMS = {
    "large_batch/lars_gap": ("lars_gap", *SIDES, "sgd_gap", "seconds"),
    "large_batch/lars_minus_sgd": ("lars_minus_sgd", *SIDES),
}
FIGURE = Path(__file__).parent.parent / "docs" / "large_batch.svg"


@dataclass(frozen=True)
class Setting:
    """What is tuned of one side; eta 0: SGD, else LARS in MLPerf's form. Always with Nesterov momentum."""

    batch: int
    lr: float
    weight_decay: float = 5e-4
    momentum: float = 0.9
    eta: float = 0.0
    warmup: float = 2.0

    def optimizer(self) -> Callable[[nn.Module], torch.optim.Optimizer]:
        """What Job makes the optimizer with."""
        more = {"trust": Trust(eta=self.eta, eps=0.0, form="mlperf")} if self.eta else {}
        settings = {"lr": self.lr, "momentum": self.momentum, "nesterov": True, "weight_decay": self.weight_decay}
        return functools.partial(lars if self.eta else sgd, **settings, **more)


@dataclass(frozen=True)
class Try:
    """A setting tried for `epochs` epochs (seed 0), and its top-1 of the held-out images in points.

    `translate`: pixels by which the images were shifted at most.
    """

    side: str
    epochs: int
    setting: Setting
    held_out: float
    translate: int = TRANSLATE


TRIED: tuple[Try, ...] = (
    Try("base", 3, Setting(256, 0.4, warmup=0.5), 90.66, 2),
    Try("base", 3, Setting(256, 0.1, warmup=0.5), 90.28, 2),
    Try("base", 20, Setting(256, 0.2), 92.96, 2),
    Try("base", 20, Setting(256, 0.4), 92.89, 2),
    Try("base", 20, Setting(256, 0.1), 92.87, 2),
    Try("base", 24, Setting(256, 0.2, warmup=4), 93.38, 2),
    Try("base", 32, Setting(256, 0.2), 93.41, 0),
    Try("base", 32, Setting(256, 0.2), 93.88),
    Try("sgd_16x", 5, Setting(LARGE, 0.4), 84.48, 2),
    Try("sgd_16x", 5, Setting(LARGE, 1.6), 83.74, 2),
    Try("sgd_16x", 5, Setting(LARGE, 0.8), 83.05, 2),
    Try("sgd_16x", 5, Setting(LARGE, 0.4, momentum=0.95), 82.91, 2),
    Try("sgd_16x", 5, Setting(LARGE, 2.0, momentum=0.8), 82.44, 2),
    Try("sgd_16x", 5, Setting(LARGE, 3.2), 76.14, 2),
    Try("sgd_16x", 20, Setting(LARGE, 0.4), 91.0, 2),
    Try("sgd_16x", 20, Setting(LARGE, 1.6), 90.85, 2),
    Try("sgd_16x", 20, Setting(LARGE, 0.4, weight_decay=2e-4), 90.78, 2),
    Try("sgd_16x", 20, Setting(LARGE, 0.2), 90.68, 2),
    Try("sgd_16x", 20, Setting(LARGE, 0.8), 90.55, 2),
    Try("sgd_16x", 20, Setting(LARGE, 0.4, momentum=0.95), 90.24, 2),
    Try("sgd_16x", 32, Setting(LARGE, 0.4), 92.51),
    Try("sgd_16x", 32, Setting(LARGE, 1.6), 92.51),
    Try("sgd_16x", 32, Setting(LARGE, 0.8), 92.38),
    Try("sgd_16x", 32, Setting(LARGE, 0.2), 91.98),
    Try("lars_16x", 5, Setting(LARGE, 0.4, eta=0.1), 87.64, 2),
    Try("lars_16x", 5, Setting(LARGE, 1.6, eta=0.02), 87.6, 2),
    Try("lars_16x", 5, Setting(LARGE, 1.6, eta=0.01), 86.96, 2),
    Try("lars_16x", 5, Setting(LARGE, 0.8, eta=0.02), 86.86, 2),
    Try("lars_16x", 5, Setting(LARGE, 1.6, momentum=0.8, eta=0.02), 86.47, 2),
    Try("lars_16x", 5, Setting(LARGE, 0.4, eta=0.02, warmup=1), 85.55, 2),
    Try("lars_16x", 20, Setting(LARGE, 1.6, eta=0.02), 92.47, 2),
    Try("lars_16x", 20, Setting(LARGE, 0.8, momentum=0.95, eta=0.03), 92.39, 2),
    Try("lars_16x", 20, Setting(LARGE, 1.6, weight_decay=2e-4, eta=0.03), 92.34, 2),
    Try("lars_16x", 20, Setting(LARGE, 0.8, eta=0.06), 92.15, 2),
    Try("lars_16x", 20, Setting(LARGE, 1.6, eta=0.04), 92.0, 2),
    Try("lars_16x", 20, Setting(LARGE, 0.8, eta=0.02), 91.79, 2),
    Try("lars_16x", 24, Setting(LARGE, 1.6, eta=0.02, warmup=4), 92.65, 2),
    Try("lars_16x", 24, Setting(LARGE, 0.8, weight_decay=2e-3, momentum=0.95, eta=0.02), 93.14, 0),
    Try("lars_16x", 32, Setting(LARGE, 1.6, eta=0.02), 93.1, 0),
    Try("lars_16x", 32, Setting(LARGE, 0.8, momentum=0.95, eta=0.03), 92.99, 0),
    Try("lars_16x", 32, Setting(LARGE, 0.8, momentum=0.95, eta=0.02), 92.96, 0),
    Try("lars_16x", 32, Setting(LARGE, 1.6, momentum=0.95, eta=0.02), 93.61),
    Try("lars_16x", 32, Setting(LARGE, 0.8, momentum=0.95, eta=0.03), 93.57),
    Try("lars_16x", 32, Setting(LARGE, 0.8, weight_decay=2e-3, momentum=0.95, eta=0.03), 93.5),
    Try("lars_16x", 32, Setting(LARGE, 1.6, eta=0.02), 93.4),
)


def train(
    dataset: Dataset, setting: Setting, seed: int, epochs: int = EPOCHS, translate: int = TRANSLATE
) -> dict[str, Any]:
    """One training: top-1 in points at the end and over the epochs, the rates, seconds."""
    start = time.perf_counter()
    chosen = choose(Device())
    torch.manual_seed(seed)
    parts = setting.batch // NORM_BATCH
    batches = loader(dataset, "train", setting.batch, seed=seed, device=chosen.device, parts=parts, fill=True)
    test = loader(dataset, "test", TEST_BATCH, device=chosen.device)
    loss = functools.partial(cross_entropy, smoothing=SMOOTHING)
    model = cnn4(in_channels=1).to(chosen.device)
    job = Job(model, setting.optimizer(), loader=batches, loss=loss, accumulate=batches.parts)
    course = Rate(Cosine(warmup=setting.warmup / epochs, epochs=epochs))
    augment = Augment(flip="random", translate=translate)
    job.apply(*chosen.techniques, course, VirtualRanks(NORM_BATCH), Recalibrate(RECALIBRATE), augment)
    curve, rates = [], []
    for epoch in range(epochs):
        for i, (x_NCHW, y_N) in enumerate(job.loader, start=1):
            (job.loss(job.model(x_NCHW), y_N) / job.accumulate).backward()
            if i % job.accumulate == 0:
                rates.append((job.progress, job.optimizer.param_groups[0]["lr"]))
                job.optimizer.step()
                job.optimizer.zero_grad()
        if (epoch + 1) % EVERY == 0 or epoch + 1 == epochs:
            with job.evaluation() as judged:
                curve.append((epoch + 1, round(100 * evaluate(judged, test).top1, 2)))
    with job.evaluation(renew_statistics=False) as judged:
        stale = round(100 * evaluate(judged, test).top1, 2)
    job.close()
    seconds = round(time.perf_counter() - start, 1)
    return {"top1": curve[-1][1], "stale": stale, "curve": curve, "rates": rates, "seconds": seconds}


def held_out(dataset: Dataset) -> Dataset:
    """The last training images in the place of the test images, which are left out."""
    images_NHWC, labels_N = dataset.train.images_NHWC, dataset.train.labels_N
    kept = Memory(images_NHWC[:-HELD_OUT], labels_N[:-HELD_OUT])
    return dataclasses.replace(dataset, train=kept, test=Memory(images_NHWC[-HELD_OUT:], labels_N[-HELD_OUT:]))


def parameters(seeds: int) -> dict[str, object]:
    """What all sides share."""
    return {"seeds": seeds, "epochs": EPOCHS, "decay": "cosine to 0",
            "nesterov": True, "norm_batch": NORM_BATCH, "smoothing": SMOOTHING, "flip": "random", "held_out": HELD_OUT,
            "translate": TRANSLATE, "recalibrate": RECALIBRATE, "threads": torch.get_num_threads()}  # fmt: skip


def tune(dataset: Dataset) -> None:
    """Tries every setting again."""
    dataset, found = held_out(dataset), []
    for row in TRIED:
        result = train(dataset, row.setting, seed=0, epochs=row.epochs, translate=row.translate)
        found.append(dataclasses.replace(row, held_out=result["top1"]))
        print(f"{found[-1]}, before: {row.held_out:.2f}; {result['seconds']} s", flush=True)
    best = {f"{side}_held_out": row.held_out for side, row in chosen(found).items()}
    finish("large_batch_tuning", parameters(1), {**best, "tried": [asdict(row) for row in found]})


def chosen(tried: Sequence[Try]) -> dict[str, Try]:
    """The best of each side, of those tried as they are compared."""
    whole = [row for row in tried if (row.epochs, row.translate) == (EPOCHS, TRANSLATE)]
    return {side: max((row for row in whole if row.side == side), key=lambda row: row.held_out) for side in SIDES}


def compare(dataset: Dataset, seeds: int) -> None:
    """The chosen settings on the whole set."""
    settings = {side: row.setting for side, row in chosen(TRIED).items()}
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(seeds):
        for side, setting in settings.items():
            results[side].append(train(dataset, setting, seed))
            last = results[side][-1]
            print(f"{side}, seed {seed}: {last['top1']:.2f} ({last['stale']:.2f} with stale statistics) "
                  f"in {last['seconds']} s", flush=True)  # fmt: skip
    mean = {side: statistics.mean(r["top1"] for r in runs) for side, runs in results.items()}
    figures: dict[str, object] = {side: round(top1, 2) for side, top1 in mean.items()}
    figures |= {
        "lars_gap": round(mean["base"] - mean["lars_16x"], 2),
        "sgd_gap": round(mean["base"] - mean["sgd_16x"], 2),
        "lars_minus_sgd": round(mean["lars_16x"] - mean["sgd_16x"], 2),
        "n": seeds,
        "lars_gap_bound": 0.5,
        "lars_minus_sgd_bound": -0.2,
        "top1": {side: [r["top1"] for r in runs] for side, runs in results.items()},
        "top1_stale": {side: [r["stale"] for r in runs] for side, runs in results.items()},
        "updates": {side: len(runs[0]["rates"]) for side, runs in results.items()},
        "seconds": {side: [r["seconds"] for r in runs] for side, runs in results.items()},
        "settings": {side: asdict(setting) for side, setting in settings.items()},
        "tried": [asdict(row) for row in TRIED],
    }
    figure(results)
    finish("large_batch", parameters(seeds), figures, CLAIMS)


def figure(results: dict[str, list[dict[str, Any]]]) -> None:
    """Top-1 over the epochs, the mean over seeds, and the rate."""
    curves = {
        side: [(points[0][0], statistics.mean(top1 for _, top1 in points))
               for points in zip(*(r["curve"] for r in runs), strict=True)]
        for side, runs in results.items()
    }  # fmt: skip
    rates = {side: [point for point in runs[0]["rates"] if point[1] > 0] for side, runs in results.items()}
    sys.path.insert(0, str(FIGURE.parent))
    from svg import Panel, draw

    panels = [Panel("top-1 of the test images, %", curves, markers=True), Panel("rate", rates, log=True)]
    draw(FIGURE, f"Fashion-MNIST, batch {NORM_BATCH} and {LARGE:,}", panels, x_label="epoch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", default="", help="the folder of the four files; empty: $KASOKU_DATA/fashion_mnist")
    parser.add_argument("--full", action="store_true", help="3 seeds")
    parser.add_argument("--tune", action="store_true", help="try all settings again, on held-out training images")
    arguments = parse(parser)
    dataset = fashion_mnist(arguments.data)
    if arguments.tune:
        tune(dataset)
    else:
        compare(dataset, seeds=3 if arguments.full else 1)


if __name__ == "__main__":
    main()
