"""A technique of your own: a frozen dataclass with `apply`. In a recipe it is found by its dotted name:

[[techniques]]
use = "own_technique.ClipValue"
limit = 0.01
"""

from dataclasses import dataclass

from kasoku.core import InputError, Job, Technique
from kasoku.data import digits, loader
from kasoku.models import cifarnet
from kasoku.optim import sgd
from kasoku.training.evaluation import evaluate


@dataclass(frozen=True)
class ClipValue(Technique, needs_whole_gradients=True):
    """Keeps every element of every gradient within +-limit."""

    limit: float = 0.01

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise InputError(f"limit={self.limit}: above 0")

    def apply(self, job: Job) -> None:
        """Acts when the loop calls `optimizer.step()`, after gradients were averaged over ranks and unscaled."""

        def clip() -> None:
            for p in job.model.parameters():
                if p.grad is not None:
                    p.grad.clamp_(-self.limit, self.limit)

        job.before_step(clip)


def main(epochs: int = 6) -> float:
    data = digits()
    model = cifarnet(in_channels=1, widths=(32, 64))
    job = Job(model, lambda m: sgd(m, lr=3.0), loader=loader(data, "train", 64)).apply(ClipValue(limit=0.01))
    for _ in range(epochs):
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    with job.evaluation() as judged:
        scores = evaluate(judged, loader(data, "test", 360))
    print(f"top-1 {scores.top1:.2%} of {scores.images} test images")
    return scores.top1


if __name__ == "__main__":
    main()
