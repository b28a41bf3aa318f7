"""Fine-tunes published weights on a folder of photos: python examples/fine_tune.py PHOTOS WEIGHTS [EPOCHS]

PHOTOS has one folder a class (or train/ and val/ with one a class); WEIGHTS is a file of ResNet-18 weights.
"""

import sys

from kasoku.core import Cosine, Job
from kasoku.data import Augment, folder, loader
from kasoku.device import Device, Seeded, choose
from kasoku.models import Pretrained, resnet18
from kasoku.optim import Rate, sgd
from kasoku.training.evaluation import evaluate


def main(photos: str, weights: str, epochs: int = 5, size: int = 128) -> float:
    data, device = folder(photos, size=size), choose(Device())
    batch = min(32, len(data.train))
    model = resnet18(num_classes=len(data.classes)).to(device.device)
    job = Job(
        model, lambda m: sgd(m, lr=0.01, nesterov=True), loader=loader(data, "train", batch, device=device.device)
    )
    start = Pretrained(weights, freeze=2)  # the stem and the first stage keep their weights
    augment = Augment(flip="random", crop="random_resized")
    job.apply(start, *device.techniques, Seeded(0), augment, Rate(Cosine(epochs=epochs)))
    for _ in range(epochs):
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    with job.evaluation() as judged:
        scores = evaluate(judged, loader(data, "test", 64, device=device.device), "mirror")
    print(f"top-1 {scores.top1:.2%} of {scores.images} test images")
    return scores.top1


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:3], *(int(arg) for arg in sys.argv[3:]))
