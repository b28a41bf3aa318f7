"""How long do 32 trials take: forks of one warm process, new processes, Optuna in one process?

    python benchmarks/trials.py [--cases digits fashion] [--rounds N] [--trials N]

Trials choose rate, momentum and weight decay of a recipe: the digits (8 epochs of digits_cnn_98, with SGD), and
Fashion-MNIST (an epoch of documents/004_search); they are evaluated eight times. In each round, one after another:
- ours: `kasoku search` as it is: two forks at once, a thread each, successive halving.
- cold: the same search as it was before: a new process a trial, and the median rule. The ratio has both causes.
- optuna-TRIALSxTHREADS: a loop that a good user would write: one process, data read once, kasoku's own trainer without
  a run folder, Optuna's SuccessiveHalvingPruner; so many trials at once, in threads. The fastest counts.
All sides have the same sampler (TPE, seed 0) and as many trials; the round is the trainings' seed. The time is that of
a side's process.
ours_over_cold (at most 0.5 is wanted) and ours_over_optuna (at most 0.9): the worst case's median over the rounds.
best: the best top-1 of each side, in the mean over the rounds; best_minus: ours minus the rivals', in points, the least
of all cases, since a search that ends good trials early is fast for nothing.
Why it matters: whoever tries settings waits for the trials, and most of a short one is the start of its process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common import finish, parse, spread

HERE = Path(__file__).resolve().parent
LOOPS = {"optuna-1x1": (1, 1), "optuna-1x2": (1, 2), "optuna-2x1": (2, 1)}  # trials at once, threads of each
SIDES = ("ours", "cold", *LOOPS)
SGD = 'optimizer={use="kasoku.optim.sgd", lr=0.01, momentum=0.9, weight_decay=5e-4}'
SPACE = """
"optimizer.lr" = { low = 1e-3, high = 1.0, log = true }
"optimizer.momentum" = { choices = [0.5, 0.8, 0.9, 0.95] }
"optimizer.weight_decay" = { low = 1e-5, high = 1e-2, log = true }
"""
CLAIMS = {
    "tune/trials/digits_over_optuna": ("digits.over_optuna", "digits.best"),
    "tune/trials/digits_over_cold": ("digits.over_cold", "digits.seconds"),
    "tune/trials/fashion_over_optuna": ("fashion.over_optuna", "fashion.best"),
    "tune/trials/fashion_over_cold": ("fashion.over_cold", "fashion.seconds"),
}


@dataclass(frozen=True)
class Case:
    """A recipe and settings over it."""

    recipe: str
    settings: tuple[str, ...]


CASES = {
    "digits": Case("digits_cnn_98", (SGD, "epochs=8", "evaluate.every=1", "evaluate.target=0")),
    "fashion": Case("documents/004_search", ("evaluate.every=0.125",)),
}


def ours(case: Case, trials: int, folder: Path) -> None:
    """`kasoku search`, in this process."""
    from kasoku.cli import main

    (folder / "space.toml").write_text(SPACE)
    words = ["search", case.recipe, "--space", str(folder / "space.toml"), "--trials", str(trials), "--jobs", "2"]
    words += [word for setting in case.settings for word in ("--set", setting)]
    if code := main([*words, "--out", str(folder / "search")]):
        raise SystemExit(code)


def cold(case: Case, trials: int, folder: Path) -> None:
    """The same with a new process a trial, and the median rule."""
    from kasoku.commands import search as command
    from kasoku.tune.hyperparameters import SearchSettings

    def as_before(plan: SearchSettings, **more: Any) -> Any:
        return search(replace(plan, prepare=None, pruner="median"), **more)

    search, command.search = command.search, as_before
    ours(case, trials, folder)


def optuna_loop(jobs: int, threads: int, case: Case, trials: int, folder: Path) -> None:
    """Optuna with trainings in this process, `jobs` of them at once, `threads` each."""
    import optuna

    from kasoku.config.recipe import dataset, load
    from kasoku.config.shipped import locate
    from kasoku.training.run_state import DivergedError
    from kasoku.training.trainer import Trainer, build

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = [*case.settings, "evaluate.stop=false", f"device.threads={threads}"]
    data = dataset(load(locate(case.recipe), settings))

    def train(trial: optuna.Trial) -> float:
        chosen = [
            f"optimizer.lr={trial.suggest_float('lr', 1e-3, 1.0, log=True)}",
            f"optimizer.momentum={trial.suggest_categorical('momentum', [0.5, 0.8, 0.9, 0.95])}",
            f"optimizer.weight_decay={trial.suggest_float('weight_decay', 1e-5, 1e-2, log=True)}",
        ]
        recipe = load(locate(case.recipe), [*settings, *chosen])
        trainer = Trainer(build(recipe, dataset=data), None, started=time.perf_counter(), quiet=True)
        evaluations, last = 0, -1
        with closing(trainer.metrics):
            for _ in trainer.steps([]):
                if trainer.validation.last_step != last:
                    last, evaluations = trainer.validation.last_step, evaluations + 1
                    trial.report(trainer.state.progress.scores["top1"], evaluations)
                    if trial.should_prune():
                        raise optuna.TrialPruned
            trainer.finish()
        return trainer.state.progress.scores["top1"]

    def or_diverge(trial: optuna.Trial) -> float:
        try:
            return train(trial)
        except DivergedError:
            return 0.0

    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=jobs > 1)
    pruner = optuna.pruners.SuccessiveHalvingPruner()
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(or_diverge, n_trials=trials, n_jobs=jobs)
    (folder / "best.json").write_text(json.dumps(study.best_value))


def best_of(folder: Path) -> float:
    """The best top-1 of a side that has ended."""
    if (found := folder / "best.json").exists():
        return float(json.loads(found.read_text()))
    return float(json.loads((folder / "search" / "search.json").read_text())["best"]["result"]["top1"])


def measure(case: str, side: str, trials: int, seed: int) -> tuple[float, float]:
    """Seconds and best top-1 of one side, in a process of its own."""
    with TemporaryDirectory() as folder:
        words = [sys.executable, str(HERE / "trials.py"), "--side", side, "--cases", case, "--trials", str(trials)]
        words += ["--seed", str(seed)]
        start = time.perf_counter()
        subprocess.run([*words, "--folder", folder], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start, best_of(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--trials", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # of one process
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if arguments.side:
        runs = {"ours": ours, "cold": cold} | {name: partial(optuna_loop, *how) for name, how in LOOPS.items()}
        case = CASES[arguments.cases[0]]
        case = replace(case, settings=(*case.settings, f"seed={arguments.seed}"))
        runs[arguments.side](case, arguments.trials, arguments.folder)
        return
    figures: dict[str, Any] = {}
    over_cold, over_optuna, off = [], [], []
    for name in arguments.cases:
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        best: dict[str, list[float]] = {side: [] for side in SIDES}
        for i in range(arguments.rounds):
            for side in SIDES if i % 2 == 0 else SIDES[::-1]:
                took, top1 = measure(name, side, arguments.trials, i)
                seconds[side].append(took)
                best[side].append(top1)
                print(f"{name}, {side}: {took:.1f} s, best {top1:.2%}", flush=True)
        pairs = zip(*seconds.values(), strict=True)
        ratios = [(mine / new, mine / min(loops)) for mine, new, *loops in pairs]
        cold_ratios, optuna_ratios = ([pair[k] for pair in ratios] for k in (0, 1))
        over_cold.append(statistics.median(cold_ratios))
        over_optuna.append(statistics.median(optuna_ratios))
        top1s = {side: statistics.fmean(values) for side, values in best.items()}
        off.append(100 * (top1s["ours"] - max(top1s.values())))
        figures[name] = {
            "seconds": {side: spread(values) for side, values in seconds.items()},
            "best": {side: round(top1, 4) for side, top1 in top1s.items()},
            "over_cold": spread(cold_ratios),
            "over_optuna": spread(optuna_ratios),
        }
    figures |= {"ours_over_cold": round(max(over_cold), 4), "ours_over_optuna": round(max(over_optuna), 4)}
    figures["best_minus"] = round(min(off), 3)
    parameters = {"cases": arguments.cases, "trials": arguments.trials, "rounds": arguments.rounds}
    finish("trials", {**parameters, "threads": torch.get_num_threads()}, figures, CLAIMS)


if __name__ == "__main__":
    main()
