"""kasoku in a loop of your own: plain objects, techniques applied, ten lines."""

from functools import partial

from kasoku.core import Job, Linear
from kasoku.data import Augment, digits, loader, sample
from kasoku.device import Device, choose
from kasoku.models import cifarnet
from kasoku.optim import EMA, Rate, SGDSettings, muon
from kasoku.training.evaluation import evaluate


def main(epochs: int = 8) -> float:
    data, device = digits(), choose(Device())
    model = cifarnet(in_channels=1, widths=(32, 64))
    model.prepare(sample(data, 1000))
    model.to(device.device)
    rule = partial(muon, lr=0.05, momentum=0.8, rest=SGDSettings(bias_lr=2.0, head_lr=20.0))
    job = Job(model, rule, loader=loader(data, "train", 64, device=device.device))
    job.apply(*device.techniques, Augment(translate=1), Rate(Linear(epochs=epochs)), EMA(0.98))
    for _ in range(epochs):
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    with job.evaluation() as judged:
        scores = evaluate(judged, loader(data, "test", 360, device=device.device))
    print(f"top-1 {scores.top1:.2%} of {scores.images} test images")
    return scores.top1


if __name__ == "__main__":
    main()
