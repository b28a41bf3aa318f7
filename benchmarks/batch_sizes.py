"""Which accuracy is left at few updates, by LARS, SGD with Nesterov momentum, Muon and AdamW?

    python benchmarks/batch_sizes.py [--short]

[000], Fig. 6: top-1 over the batch at equal epochs, so the largest batch makes the fewest updates. Fashion-MNIST by
recipes/documents/000_few_updates.toml, in which only the batch and the rule differ. Of the training images the first
30,000 are taken, so that a batch of 2,048 makes 15 updates an epoch, as [000]'s 81,920 makes 16; the largest makes 4.
Equal tuning: all rates of a rule are those below at batch 4,096, times the root of batch / 4,096, times the one of
FACTORS that is best on 10,000 held-out training images (seed 0). Weight decay and momentum are fixed.
--short: 12,288 images and batches of 256 to 1,536, so that 768 makes 16 updates an epoch, the factor 1.
error_over_smallest: errors (1 - top-1) at the largest batch of at least 15 updates an epoch, over those at the smallest
batch.
Why it matters: a batch spread over thousands of devices must not cost accuracy.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import finish
from trainings import DOCUMENTS, Trained, data_folder, held_out_folder, options, points, train_all

RECIPE = DOCUMENTS / "000_few_updates.toml"
FACTORS = (0.5, 1.0, 2.0)
FEW = 15  # updates an epoch, as [000] has them
RULES: dict[str, Callable[[float], str]] = {  # the optimizer at a factor on its rates, at batch 4,096
    "lars": lambda f: (
        f'use="kasoku.optim.lars", lr={1.6 * f}, momentum=0.95, nesterov=true, weight_decay=5e-4, trust={{eta=0.02}}'
    ),
    "nesterov": lambda f: f'use="kasoku.optim.sgd", lr={0.8 * f}, momentum=0.9, nesterov=true, weight_decay=5e-4',
    "muon": lambda f: (
        f'use="kasoku.optim.muon", lr={0.16 * f}, momentum=0.8, '
        f"rest={{bias_lr={0.4 * f}, head_lr={0.4 * f}, momentum=0.9, weight_decay=1e-3}}"
    ),
    "adamw": lambda f: f'use="kasoku.optim.adamw", lr={0.016 * f}, weight_decay=0.05',
}


@dataclass(frozen=True)
class Form:
    """How much is trained: training images, epochs, batches, factors on the rates."""

    images: int = 30_000
    epochs: int = 16
    batches: tuple[int, ...] = (256, 2048, 8192)
    factors: tuple[float, ...] = FACTORS

    @property
    def few(self) -> int:
        """The largest batch of at least FEW updates an epoch, an incomplete one filled up."""
        return max(batch for batch in self.batches if -(-self.images // batch) >= FEW)

    def settings(self, rule: str, batch: int, factor: float, seed: int) -> list[str]:
        """Settings over the recipe."""
        optimizer = f"optimizer={{{RULES[rule](factor)}}}"
        return [optimizer, f"batch={batch}", f"epochs={self.epochs}", f"seed={seed}", "evaluate.every=100"]


SHORT = Form(12_288, 8, (256, 768, 1536), (1.0,))


def chosen(form: Form, tried: dict[tuple[str, int, float], Trained]) -> dict[tuple[str, int], float]:
    """The best factor of each rule at each batch; one that is alone needs no trial."""

    def best(rule: str, batch: int) -> float:
        tops = {factor: tried[rule, batch, factor].top1 for factor in form.factors if tried}
        return max(form.factors, key=lambda factor: tops.get(factor, 0.0))

    return {(rule, batch): best(rule, batch) for rule in RULES for batch in form.batches}


def figures(
    form: Form, factors: dict[tuple[str, int], float], top1: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    """What the JSON line has, from the accuracies by rule and batch, a value a seed."""
    result: dict[str, Any] = {}
    for rule in RULES:
        mean = {batch: statistics.fmean(top1[rule, batch]) for batch in form.batches}
        result[rule] = {
            "accuracy_by_batch": [[batch, round(mean[batch], 4)] for batch in form.batches],
            "at_few_updates": round(mean[form.few], 4),
            "error_over_smallest": round((1 - mean[form.few]) / max(1e-4, 1 - mean[form.batches[0]]), 4),
            "factors": [factors[rule, batch] for batch in form.batches],
            "top1": [top1[rule, batch] for batch in form.batches],
        }
        if rule != "lars":
            off, ends = points(top1["lars", form.few], top1[rule, form.few])
            result |= {f"lars_minus_{rule}": off, f"lars_minus_{rule}_interval": ends}
    updates = {batch: -(-form.images // batch) * form.epochs for batch in form.batches}
    return result | {"few_updates_batch": form.few, "updates": updates, "n": len(top1["lars", form.few])}


def main() -> None:
    arguments = options(__doc__, "batch_sizes", images=SHORT.images, seeds=3).parse_args()
    form, seeds = (SHORT, 1) if arguments.short else (Form(), arguments.seeds)
    out = arguments.out / ("short" if arguments.short else "whole")
    trials = {}
    if len(form.factors) > 1:
        root = held_out_folder(arguments.data, out, form.images)
        trials = {
            (rule, batch, factor): [*form.settings(rule, batch, factor, 0), f"data.root={root}"]
            for rule in RULES
            for batch in form.batches
            for factor in form.factors
        }
    factors = chosen(form, train_all(RECIPE, trials, out / "trials", arguments.jobs))
    root = data_folder(arguments.data, out, form.images)
    runs = {
        (rule, batch, seed): [*form.settings(rule, batch, factor, seed), f"data.root={root}"]
        for (rule, batch), factor in factors.items()
        for seed in range(seeds)
    }
    trained = train_all(RECIPE, runs, out / "seeds", arguments.jobs)
    top1 = {pair: [trained[*pair, seed].top1 for seed in range(seeds)] for pair in factors}
    parameters = {"images": form.images, "epochs": form.epochs, "factors": form.factors, "seeds": seeds}
    rules = {rule: optimizer(1.0) for rule, optimizer in RULES.items()}
    finish("batch_sizes", {**parameters, "rules_at_4096": rules}, figures(form, factors, top1))


if __name__ == "__main__":
    main()
