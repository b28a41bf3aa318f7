"""Which groups of gradients are the best, and does the planner find them?

    python benchmarks/planned_buckets.py [--seconds S]

As root: two ranks with a shaped link, as in benchmarks/overlap.py, CIFAR ResNet-18. Every policy with a barrier (the
step waits for all groups) and with next-forward overlap in ready order (a group is sent when backward has filled it);
planned: groups, pieces and order searched from measured times. All on one training, which goes over from plan to plan.
Three cases in one run: balanced (the all-reduce alone takes as long as computing alone), comm_bound (2.5 times as
long), compute_bound (no limit). 32 images a rank, so that the default run ends in time.
planned_over_best_fixed: planned over the best of the fixed sizes with a barrier, which is what DDP can be set to;
planned_over_one_group: over one group with a barrier; planned_over_best: over the least median of all others, hidden or
not (bound: 1.02); planned_over_best_unbiased: the same with the best chosen by every second round and compared in the
others, both ways, since the least of twelve noisy medians is too low; prediction_error: |forecast - measured| /
measured of the planned step. The same for the other cases under comm_... and compute_....
Result: records/. Why it matters: nobody should have to tune groups by hand for each network and cluster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from cluster import MODES, Side, Transfer, Way, Workload, balance, connected, on_hosts, ours, rounds, shape
from common import finish, parse, spread
from kasoku.distributed import Fixed, Graded, OneBucket, PerLayer, Planned, Policy

MIB = 2**20
POLICIES: dict[str, Policy] = {
    "one": OneBucket(),
    "fixed_1": Fixed(MIB),
    "fixed_5": Fixed(5 * MIB),
    "fixed_25": Fixed(25 * MIB),
    "graded": Graded(),
    "layer": PerLayer(),
}
STEPS, BUDGET_S = 2, 600
CLAIMS = {
    "planned/balanced/over_best_fixed": "planned_over_best_fixed",
    "planned/balanced/over_one_group": "planned_over_one_group",
    "planned/balanced/prediction_error": ("prediction_error", "expected_s"),
    "planned/over_best/balanced": ("planned_over_best", "planned_over_best_unbiased"),
    "planned/over_best/comm_bound": ("comm_planned_over_best", "comm_planned_over_best_unbiased"),
    "planned/over_best/compute_bound": ("compute_planned_over_best", "compute_planned_over_best_unbiased"),
}


def ways(side: Side) -> dict[str, Way]:
    """Each policy and way to wait, and what was planned, on one training."""
    engine = side.job.kept("overlap")
    found = {"planned": Way(side, engine.layout.plan, engine.late)}
    for name, policy in POLICIES.items():
        plan = policy.plan(engine.layers.tensors)
        found |= {f"{name}_barrier": Way(side, plan, late=False), name: Way(side, plan, late=True)}
    return found


def rank_main(work: Workload, budget_s: float) -> None:
    """What each rank does."""
    comm = connected()
    alone = Side(work, comm, lambda model, optimizer: (model, None))
    transfer = Transfer(comm.channel(), alone.model)
    for _ in range(5):  # memory is laid out, clocks are up
        alone()
    figures: dict[str, object] = {}
    for mode, ratio in MODES.items():
        shape(0)
        mbit = balance(comm, alone.once, transfer.once, ratio) if ratio else 0.0
        side = Side(work, comm, ours(comm, Planned()))
        side.plan()
        expected_s = side.job.kept("overlap").forecast.step_s
        seconds = rounds(comm, ways(side), steps=STEPS, budget_s=budget_s / len(MODES))
        prefix = {"balanced": "", "comm_bound": "comm_", "compute_bound": "compute_"}[mode]
        figures |= {f"{prefix}{name}": value for name, value in judged(seconds, expected_s, mbit).items()}
    if comm.rank == 0:
        parameters = {"model": work.model, "batch": work.batch, "ranks": 2, "threads": 1, "steps": STEPS}
        bounds = {"planned_over_best_fixed_bound": 0.92, "planned_over_one_group_bound": 0.66}
        finish("planned_buckets", parameters, {**figures, **bounds, "prediction_error_bound": 0.10}, CLAIMS)


def judged(seconds: dict[str, list[float]], expected_s: float, mbit: float) -> dict[str, Any]:
    """The figures of one case."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    planned = median.pop("planned")
    best = min(median, key=lambda name: median[name])
    fixed = min(median[name] for name in median if name.startswith("fixed") and name.endswith("barrier"))
    return {
        "planned_over_best_fixed": round(planned / fixed, 4),
        "planned_over_one_group": round(planned / median["one_barrier"], 4),
        "planned_over_best": round(planned / median[best], 4),
        "planned_over_best_unbiased": round(unbiased(seconds), 4),
        "prediction_error": round(abs(expected_s - planned) / planned, 4),
        "expected_s": round(expected_s, 4),
        "best": best,
        **dict.fromkeys(("n", "planned_over_best_n"), len(seconds["planned"])),
        "mbit": round(mbit, 1),
        "seconds": {name: {k: round(v, 4) for k, v in spread(values).items()} for name, values in seconds.items()},
    }


def unbiased(seconds: dict[str, list[float]]) -> float:
    """Planned over the best of the others, which is chosen by other rounds than it is compared in."""
    halves = [{name: values[i::2] for name, values in seconds.items()} for i in (0, 1)]
    found = []
    for chosen, judged_by in (halves, halves[::-1]):
        best = min((name for name in chosen if name != "planned"), key=lambda name: statistics.median(chosen[name]))
        found.append(statistics.median(judged_by["planned"]) / statistics.median(judged_by[best]))
    return statistics.mean(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="images a rank")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for the timed rounds of all cases")
    arguments = parse(parser)
    if "RANK" not in os.environ:
        return on_hosts(__file__, sys.argv[1:])
    rank_main(Workload(batch=arguments.batch), arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
