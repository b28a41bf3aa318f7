"""What does the trainer cost over a bare loop, and what do the defaults gain over PyTorch's?

Command: python benchmarks/trainer_overhead.py

trainer_over_bare: cifarnet, batch 64, 32x32 images: the median step of `kasoku.training.trainer.fit` (real run folder,
log, loader with flip and shift) over that of a hand-written loop with the same settings (bf16, channels_last, the same
optimizer, augmentation by hand), in rounds that alternate in one process. Bound: 1.
out_of_the_box_over_ours: ResNet-50, 224 pixels, batch 32: a plain PyTorch loop with PyTorch's defaults (fp32, NCHW,
default allocator) against Job with the techniques `device.choose` picks, each in processes of its own, alternating.
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from common import finish, parse, seconds_per_call, spread

ROUNDS, STEPS = 12, 25
BATCH, IMAGES = 64, 6400
CLAIMS = {
    "trainer/over_bare": ("trainer_over_bare", "trainer_ms", "bare_ms"),
    "resnet50/over_defaults": ("out_of_the_box_over_ours", "resnet50_images_per_s"),
}
BIG_ROUNDS, BIG_STEPS, BIG_BATCH = 3, 3, 32


def trainer_over_bare() -> dict[str, object]:
    from kasoku.config import trust
    from kasoku.config.recipe import from_document
    from kasoku.device import tune_malloc
    from kasoku.training.run_folder import RunFolder
    from kasoku.training.trainer import build, fit

    tune_malloc()
    trust.allow(["trainer_overhead"])
    document = {
        "epochs": 1000,
        "batch": BATCH,
        "model": {"use": "kasoku.models.cifarnet"},
        "data": {"use": "trainer_overhead.random_images"},
        "optimizer": {"use": "kasoku.optim.sgd", "lr": 0.05, "nesterov": True, "weight_decay": 5e-4},
        "techniques": [{"use": "kasoku.data.Augment", "flip": "random", "translate": 2}],
        "evaluate": {"every": 1e6},
    }
    training = build(from_document(document))
    ours: list[float] = []
    last = [0.0]

    def stamp(params: object) -> None:
        now = time.perf_counter()
        ours.append(now - last[0])
        last[0] = now

    training.job.after_update(stamp)
    bare = bare_loop(training)
    ratios, ours_s, bare_s = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(ROUNDS):
            bare_times = bare()
            ours.clear()
            total = training.job.steps + STEPS
            with_steps = dataclasses.replace(training, total_steps=total)
            run = RunFolder(Path(folder) / str(round_number))
            fit(with_steps, run, started=time.perf_counter(), quiet=True)
            run.close()
            pair = statistics.median(ours[1:]), statistics.median(bare_times)
            ours_s.append(pair[0])
            bare_s.append(pair[1])
            if round_number:
                ratios.append(pair[0] / pair[1])
    return {
        "trainer_over_bare": round(statistics.median(ratios), 4),
        "trainer_over_bare_spread": spread([round(r, 4) for r in ratios]),
        "trainer_ms": round(1000 * statistics.median(ours_s), 2),
        "bare_ms": round(1000 * statistics.median(bare_s), 2),
    }


def random_images():
    """6,400 random images of 32x32 in memory: what is measured does not depend on their content."""
    from kasoku.data import Dataset, Memory

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    train, test = Memory(images, labels), Memory(images[:64], labels[:64])
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    return Dataset("random", tuple("0123456789"), train, test, 3, (32, 32), mean, std)


def bare_loop(training):
    """A function that runs STEPS steps of a hand-written loop and returns the seconds of each."""
    from kasoku.models import cifarnet

    device = training.device_setup.device.type
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.device_setup.precision)
    model = cifarnet(num_classes=10).to(device, memory_format=torch.channels_last)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    data = random_images()
    images_NCHW = data.train.images_NHWC.to(device).permute(0, 3, 1, 2).float().div_(255).sub_(0.5).div_(0.25)
    padded_NHWC = nn.functional.pad(images_NCHW, (2, 2, 2, 2), mode="reflect").permute(0, 2, 3, 1).contiguous()
    windows = padded_NHWC.unfold(1, 32, 1).unfold(2, 32, 1).permute(0, 1, 2, 4, 5, 3)  # N, shift, shift, H, W, C
    labels = data.train.labels_N.to(device)

    def crops(index: torch.Tensor) -> torch.Tensor:
        dy, dx = torch.randint(0, 5, (2, len(index)), device=device)
        flip = (torch.rand(len(index), device=device) < 0.5)[:, None, None, None]
        x_NHWC = windows[index, dy, dx]
        return torch.where(flip, x_NHWC.flip(2), x_NHWC).permute(0, 3, 1, 2)

    def run() -> list[float]:
        seconds = []
        order = torch.randperm(IMAGES)
        for i in range(STEPS):
            start = time.perf_counter()
            index = order[i * BATCH : (i + 1) * BATCH]
            x, y = crops(index), labels[index]
            with torch.autocast(device, dtype, enabled=dtype is not None):
                out = model(x)
            loss = nn.functional.cross_entropy(out.float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def resnet50_seconds(side: str) -> list[float]:
    """Seconds of some ResNet-50 steps, one way or the other; this process does nothing else."""
    from kasoku.core import Job
    from kasoku.device import Device, choose, tune_malloc
    from kasoku.models import resnet50

    if side == "ours":
        tune_malloc()
        chosen = choose(Device())
        device = chosen.device
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet50().to(device)
    x, y = torch.randn(BIG_BATCH, 3, 224, 224, device=device), torch.randint(1000, (BIG_BATCH,), device=device)
    if side == "ours":
        from kasoku.optim import sgd

        x = x.to(memory_format=torch.channels_last)
        job = Job(model, sgd, loader=[(x, y)]).apply(*chosen.techniques)
        forward, loss, optimizer = job.model, job.loss, job.optimizer
    else:
        forward, loss = model, nn.functional.cross_entropy
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        loss(forward(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds_per_call(step, calls=BIG_STEPS, warm=2)


def out_of_the_box_over_ours() -> dict[str, object]:
    ratios, rates = [], {"out_of_the_box": [], "ours": []}
    for _ in range(BIG_ROUNDS):
        for side, seen in rates.items():
            done = subprocess.run(
                [sys.executable, __file__, "--side", side], check=True, capture_output=True, text=True
            )
            seen.append(BIG_BATCH / statistics.median(map(float, done.stdout.split())))
        ratios.append(rates["ours"][-1] / rates["out_of_the_box"][-1])
    return {
        "out_of_the_box_over_ours": round(statistics.median(ratios), 3),
        "out_of_the_box_over_ours_spread": spread([round(r, 3) for r in ratios]),
        "resnet50_images_per_s": {side: round(statistics.median(seen), 2) for side, seen in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--side", choices=("ours", "out_of_the_box"), help=argparse.SUPPRESS)
    side = parse(parser).side
    if side:
        print(*resnet50_seconds(side))
        return
    parameters = {"batch": BATCH, "rounds": ROUNDS, "steps": STEPS, "resnet50_batch": BIG_BATCH, "pixels": 224}
    finish("trainer_overhead", parameters, {**trainer_over_bare(), **out_of_the_box_over_ours()}, CLAIMS)


if __name__ == "__main__":
    main()
