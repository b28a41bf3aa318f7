"""What does the simulator say of [000]'s 2,048 GPUs: the gain of its groups at each batch, and the whole training?

    python benchmarks/simulate_abci.py

[000], Fig. 9 and 10: ResNet-50 on ABCI, 16 to 64 images a GPU, one all-reduce after backward against groups behind
backward (`Graded`, from the code of the team's MLPerf v0.6 entry), both hierarchical and in 16 bits, with that entry's
settings of Horovod and NCCL; and the training of Table 2: 90 epochs of 16 updates, 40 images a GPU. It is the sweep of
`kasoku simulate --sweep images=16:64`. Seconds on one core; docs/simulated.py draws the same curves.
groups_over_one_least: images/s with groups over those without, the least over all batches; ..._at_16, ..._at_40.
first_group_over_largest: tensors in the first group, nearest the output, over those in the largest one.
images_per_s_over_published, training_s_over_published: over 1.73 million and 74.7 s.

Note: the extra time of the first epoch, the set-up and the evaluations of a training are not predictions: they are in
abci.toml, from the log of the MLPerf v0.6 entry. benchmarks/simulate_published.py says what is known to be wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from common import finish
from kasoku.distributed import Graded, Hierarchical, OneBucket
from kasoku.models import resnet50
from kasoku.simulate import ModelCosts, Sharing, SimulatedStep, Simulator, load, model_costs
from kasoku.simulate.from_recipe import sweep

GPUS, SHARES = 2048, (16, 20, 24, 28, 32, 36, 40, 42, 48, 56, 64)  # images a GPU
ONE, GROUPS = "one group after backward", "graded groups behind backward"
WAYS = {ONE: Sharing(OneBucket(), reducer=Hierarchical()), GROUPS: Sharing(Graded(), reducer=Hierarchical())}
SETTINGS = ("cycle_ms=0.2", 'protocols=["Simple"]')  # HOROVOD_CYCLE_TIME=0.2, NCCL_LL_THRESHOLD=1024
IMAGES, EPOCHS, STEPS, EVALUATIONS = 40, 90, 16, 23  # of [000]; its evaluations are those of the MLPerf v0.6 entry
IMAGES_PER_S, TRAINING_S = 1.73e6, 74.7  # published in [000]


def network() -> ModelCosts:
    """ResNet-50 with gradients in 16 bits."""
    with torch.device("meta"):
        return model_costs("resnet50", resnet50(), (3, 224, 224)).with_gradients(2)


def simulators(net: ModelCosts) -> dict[str, Simulator]:
    """Both ways on ABCI, with the entry's settings."""
    return {name: Simulator(load("abci", SETTINGS), net, way) for name, way in WAYS.items()}


def steps(net: ModelCosts, way: str, shares: Sequence[int] = SHARES) -> list[SimulatedStep]:
    """A step of 2,048 GPUs for each number of images a GPU."""
    lines = sweep({way: simulators(net)[way]}, "images", shares, gpus=GPUS, batch=GPUS)
    return [step for _, step in lines[way]]


def computing_alone(net: ModelCosts) -> list[tuple[int, float]]:
    """(images a GPU, images/s) of 2,048 equal GPUs that exchange nothing."""
    alone = [Simulator(load("abci"), net, spread=0.0).step(1, images) for images in SHARES]
    return [(step.images, GPUS * step.images_per_s) for step in alone]


def epochs(net: ModelCosts, way: str, images: int, updates: int) -> list[tuple[int, float]]:
    """(epoch, seconds) of the first ten epochs."""
    (step,) = steps(net, way, [images])
    first_s = load("abci").costs.first_epoch_s
    return [(epoch, updates * step.step_s + (first_s if epoch == 1 else 0.0)) for epoch in range(1, 11)]


def training_s(step: SimulatedStep) -> float:
    """Seconds of [000]'s training with such steps."""
    costs = load("abci").costs
    return costs.setup_s + costs.first_epoch_s + EVALUATIONS * costs.evaluation_s + EPOCHS * STEPS * step.step_s


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    net = network()
    one, groups = steps(net, ONE), steps(net, GROUPS)
    gain = {n: b.images_per_s / a.images_per_s for n, a, b in zip(SHARES, one, groups, strict=True)}
    published = groups[SHARES.index(IMAGES)]
    megabytes = [size / 1e6 for size in published.inputs.sizes()]
    tensors = [len(group) for group in published.inputs.plan.buckets]

    def million(simulated: Sequence[SimulatedStep]) -> list[tuple[int, float]]:
        return [(step.images // GPUS, step.images_per_s / 1e6) for step in simulated]

    figures: dict[str, object] = {
        "groups_over_one_least": min(gain.values()),
        "groups_over_one_at_16": gain[16],
        "groups_over_one_at_40": gain[40],
        "group_mb": megabytes,
        "smallest_group_mb": min(megabytes),
        "group_tensors": tensors,
        "first_group_over_largest": tensors[0] / max(tensors),
        "images_per_s": published.images_per_s,
        "images_per_s_over_published": published.images_per_s / IMAGES_PER_S,
        "training_s": training_s(published),
        "training_s_over_published": training_s(published) / TRAINING_S,
        "million_images_per_s": {
            "one": million(one),
            "groups": million(groups),
            "alone": [(images, rate / 1e6) for images, rate in computing_alone(net)],
        },
        "exposed_ms": {
            "one": [(step.images // GPUS, 1e3 * step.exposed_s) for step in one],
            "groups": [(step.images // GPUS, 1e3 * step.exposed_s) for step in groups],
        },
        "epoch_s": epochs(net, GROUPS, IMAGES, STEPS),
    }
    finish("simulate_abci", {"gpus": GPUS, "epochs": EPOCHS, "updates_an_epoch": STEPS}, figures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
