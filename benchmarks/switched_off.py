"""What are warm-up, label smoothing and right BatchNorm averages worth at few updates?

    python benchmarks/switched_off.py [--short]

[000] 4.1.1 and 4.1.2. Fashion-MNIST by recipes/documents/000_few_updates.toml (LARS, batch 4,096, 15 updates an
epoch, 16 virtual ranks), with one setting switched off at a time, in points of top-1 of the test images, the mean over
seeds (positive: it helps):
warmup_points: a warm-up of the learning rate against none, at the same rate; a training that diverges counts 0.
smoothing_points: label smoothing 0.1 against none.
averages_points: running statistics over 0.1 epochs (`norm_average`) against BatchNorm's usual momentum, both without
Recalibrate.
recalibration_points: statistics measured before the evaluation (Recalibrate) against running statistics over 0.1
epochs.
The last two also as ..._midway: the mean over the evaluations before the turn of the rate, whose weights still move
far.
--short: 12,288 images, batch 768, 8 epochs, one seed.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import finish
from trainings import DOCUMENTS, Trained, data_folder, options, points, train_all

RECIPE = DOCUMENTS / "000_few_updates.toml"
SIDES = {
    "all": [],
    "without_warmup": ["schedule.warmup=0"],
    "without_smoothing": ["loss.smoothing=0"],
    "without_averages": ["norm_average=0"],
}
SHORT_IMAGES = 12_288
SHORT = ["batch=768", "epochs=8", "evaluate.every=2"]
TURN = 0.7  # of the training: before the fall of the rate
EVERY = 4  # updates between points of the rate


def midway(trained: Trained, name: str) -> float:
    """The mean of a value over the evaluations before the rate falls."""
    values = trained.over_epochs(name)
    return statistics.fmean(value for epoch, value in values if epoch < TURN * values[-1][0])


def figures(trained: Mapping[str, Sequence[Trained]]) -> dict[str, Any]:
    """What the JSON line has, from the trainings by side, one a seed."""

    def of(side: str, name: str) -> list[float]:
        return [run.over_epochs(name)[-1][1] if run.metrics else 0.0 for run in trained[side]]

    def halfway(side: str, name: str) -> list[float]:
        return [midway(run, name) for run in trained[side]]

    fresh, stale, without = "test_top1", "test_stale_top1", "without_averages"
    differences = {
        "warmup": points(of("all", fresh), of("without_warmup", fresh)),
        "smoothing": points(of("all", fresh), of("without_smoothing", fresh)),
        "averages": points(of("all", stale), of(without, stale)),
        "recalibration": points(of("all", fresh), of("all", stale)),
        "averages_midway": points(halfway("all", stale), halfway(without, stale)),
        "recalibration_midway": points(halfway("all", fresh), halfway("all", stale)),
    }
    first = trained["all"][0]
    return {
        **{f"{name}_points": off for name, (off, _) in differences.items()},
        **{f"{name}_points_interval": ends for name, (_, ends) in differences.items()},
        "top1": {side: of(side, fresh) for side in trained},
        "stale_top1": {side: of(side, stale) for side in trained},
        "accuracy_by_epoch": first.over_epochs(fresh),
        "stale_accuracy_by_epoch": first.over_epochs(stale),
        "usual_stale_accuracy_by_epoch": trained[without][0].over_epochs(stale),
        "rate_by_epoch": first.over_epochs("lr")[::EVERY],
        "n": len(trained["all"]),
    }


def main() -> None:
    arguments = options(__doc__, "switched_off", images=SHORT_IMAGES, seeds=3).parse_args()
    seeds, more = (1, SHORT) if arguments.short else (arguments.seeds, [])
    out = arguments.out / ("short" if arguments.short else "whole")
    root = data_folder(arguments.data, out, SHORT_IMAGES if arguments.short else 0)
    runs = {
        (side, seed): [f"data.root={root}", *more, *settings, f"seed={seed}"]
        for side, settings in SIDES.items()
        for seed in range(seeds)
    }
    trained = train_all(RECIPE, runs, out, arguments.jobs)
    by_side = {side: [trained[side, seed] for seed in range(seeds)] for side in SIDES}
    finish("switched_off", {"seeds": seeds, "short": arguments.short}, figures(by_side))


if __name__ == "__main__":
    main()
