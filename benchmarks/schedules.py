"""Is the arc cotangent better than other schedules at about 15 updates an epoch?

    python benchmarks/schedules.py [--short]

[000] 4.1.2 says so of step, polynomial and linear decay; the cosine is today's usual one. Fashion-MNIST by
recipes/documents/000_few_updates.toml (LARS), in which only the schedule differs: 240 updates of 2,048 images, 15 an
epoch, of the first 30,000 training images. Turn and decay of the arc cotangent are [000]'s; the steps are Goyal's 30,
60 and 80 of 90 epochs by 0.1; the polynomial is MLPerf's, of power 2.
Equal tuning: for each schedule `kasoku search` makes the same number of trials over the same space of rate and
warm-up, on 10,000 held-out training images. (Up to 10 trials, its sampler proposes the same settings for all.) The
best settings then train with each seed.
arc_cotangent_minus_best_other: points of top-1 of the test images, the mean over seeds, with its paired 95 % interval
from 3 seeds on. The other schedule is the one of the highest mean on the test images, a choice that favours the
others.
--short: 12,288 images, 80 updates of 768 images, 3 trials for each schedule, one seed.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import finish
from trainings import DOCUMENTS, data_folder, held_out_folder, options, points, train_all, verdict

RECIPE = DOCUMENTS / "000_few_updates.toml"
SPACE = """optimizer.lr = {low = 0.4, high = 6.4, log = true}
schedule.warmup = {low = 0.03, high = 0.25}
"""
ARC = "arc_cotangent"
SCHEDULES = {
    ARC: 'use="kasoku.core.ArcCotangent", turn=0.7777777777777778, decay=5',
    "step": 'use="kasoku.core.StepDecay", milestones=[0.3333333333333333, 0.6666666666666666, 0.8888888888888888]',
    "polynomial": 'use="kasoku.core.Polynomial", power=2',
    "linear": 'use="kasoku.core.Linear"',
    "cosine": 'use="kasoku.core.Cosine"',
}


@dataclass(frozen=True)
class Form:
    """How much is trained: training images, batch, epochs."""

    images: int = 30_000
    batch: int = 2048
    epochs: int = 16

    def settings(self, name: str, root: str) -> list[str]:
        """Settings over the recipe."""
        schedule = f"schedule={{{SCHEDULES[name]}}}"
        return [schedule, f"data.root={root}", f"batch={self.batch}", f"epochs={self.epochs}", "evaluate.every=100"]


SHORT, SHORT_TRIALS = Form(12_288, 768, 5), 3


def best_settings(search: Mapping[str, Any]) -> tuple[list[str], float]:
    """The settings of the best trial in a search.json, and its top-1."""
    best = search["best"]
    if best is None:
        raise SystemExit(f"no trial of {search['trials']} is done: see their folders, and repeat the command")
    return [f"{path}={value}" for path, value in best["settings"].items()], best["result"]["top1"]


def search(settings: Sequence[str], out: Path, trials: int, jobs: int) -> tuple[list[str], float]:
    """The best settings that `kasoku search` finds, and their top-1 of the held-out images."""
    out.parent.mkdir(parents=True, exist_ok=True)
    space = out.parent / "space.toml"
    space.write_text(SPACE)
    words = [word for setting in (*settings, "device.threads=1") for word in ("--set", setting)]
    command = [sys.executable, "-m", "kasoku", "search", str(RECIPE), "--space", str(space), "--trials", str(trials)]
    subprocess.run([*command, "--jobs", str(jobs), "--out", str(out), *words], check=True)
    return best_settings(json.loads((out / "search.json").read_text()))


def figures(top1: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the JSON line has, from the accuracies by schedule, a value a seed."""
    mean = {name: statistics.fmean(values) for name, values in top1.items()}
    off = {name: points(top1[ARC], values) for name, values in top1.items() if name != ARC}
    best = max(off, key=lambda name: mean[name])
    difference, ends = off[best]
    return {
        "arc_cotangent_minus_best_other": difference,
        "arc_cotangent_minus_best_other_interval": ends,
        "arc_cotangent_is": verdict(ends),
        "best_other": best,
        "accuracy": {name: round(value, 4) for name, value in mean.items()},
        **{f"arc_cotangent_minus_{name}": mean_off for name, (mean_off, _) in off.items()},
        **{f"arc_cotangent_minus_{name}_interval": ends for name, (_, ends) in off.items()},
        "top1": {name: list(values) for name, values in top1.items()},
        "n": len(top1[ARC]),
    }


def main() -> None:
    parser = options(__doc__, "schedules", images=SHORT.images, seeds=3)
    parser.add_argument("--trials", type=int, default=6, help="of each schedule (default: %(default)s)")
    arguments = parser.parse_args()
    form, trials, seeds = Form(), arguments.trials, arguments.seeds
    if arguments.short:
        form, trials, seeds = SHORT, SHORT_TRIALS, 1
    out = arguments.out / ("short" if arguments.short else "whole")
    root = held_out_folder(arguments.data, out, form.images)
    chosen, held_out = {}, {}
    for name in SCHEDULES:
        found = search(form.settings(name, root), out / "searches" / name, trials, arguments.jobs)
        chosen[name], held_out[name] = found
    root = data_folder(arguments.data, out, form.images)
    runs = {
        (name, seed): [*form.settings(name, root), *chosen[name], f"seed={seed}"]
        for name in SCHEDULES
        for seed in range(seeds)
    }
    trained = train_all(RECIPE, runs, out / "seeds", arguments.jobs)
    top1 = {name: [trained[name, seed].top1 for seed in range(seeds)] for name in SCHEDULES}
    parameters = {"images": form.images, "batch": form.batch, "epochs": form.epochs, "trials": trials}
    tuned = {"settings": chosen, "held_out": held_out}
    finish("schedules", {**parameters, "seeds": seeds, "space": SPACE}, figures(top1) | tuned)


if __name__ == "__main__":
    main()
