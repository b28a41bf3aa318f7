"""How much of the communication does Overlap hide, beside the best that DDP can be set to?

    python benchmarks/overlap.py [--case balanced | comm_bound | compute_bound] [--model resnet18 | alexnet | vgg16]
                                 [--own]

As root: two ranks in network namespaces of their own, a core and one thread each, gloo, bf16 autocast. The link is
shaped until the all-reduce of all gradients alone takes as long as forward, backward and update alone (balanced), 2.5
times as long (comm_bound), or not at all (compute_bound). Interleaved in one run: computing alone (both ranks at once),
the all-reduce alone, computing beside an all-reduce of unrelated buffers (bound_contended), ours with a barrier, ours
overlapped, that with Planned(shards=True), where ranks share updates if the planner forecasts a shorter step so
(planned_shares says whether they do), ours with all updates shared (sharded), and the rivals: DDP with its defaults;
DDP with gradient_as_bucket_view and static_graph, and bucket_cap_mb of 1, 2, 5, 10 and 25, or a list that grows from 1
MiB at the output to 25; FSDP2 (fully_shard, reshard_after_forward = False) with a group a layer or a group a block.
FSDP2 takes contiguous weights only, and torch's fused SGD does not take its parameters: its optimizer is the foreach
form, of the same maths. A step is timed from the start of one forward to the start of another, with the one before
still under way.
--own: instead of DDP, the sides of [003]: one all-reduce after backward (after), all-reduces behind backward
(barrier), and behind the next forward too (ours). Without root the ranks meet over loopback, which is not shaped: there
is almost nothing to hide, so the ratios of these three are null, and only their seconds are there.
ours_over_best_ddp: the median of ours over the least median of DDP's; ours_over_best_of_all: over the least of all
rivals' medians.
planned_over_best_of_all: the median with Planned(shards=True) over that. ours_over_bound: over max(computing,
all-reduce); ranks that share updates compute less, so it is no bound for them. sharded_over_overlap: the median of
sharded over that of ours. FSDP2 is the rival that shares updates.
Result: records/. Why it matters: what communication shows is time that all devices lose.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cluster import MODES, Side, Transfer, Workload, Wrap, balance, connected, on_hosts, ours, ratio, rounds
from common import finish, parse, spread
from kasoku.distributed import OneBucket, Planned

BUCKETS_MB = (1, 2, 5, 10, 25)
GROWING_MB = [1, 2, 4, 8, 16, 25]
STEPS, BUDGET_S = 3, 300
OF_ALL = ("ours_over_best_of_all", "best_of_all", "sharded_over_overlap", "planned_over_best_of_all", "planned_shares")
CLAIMS = {  # of overlap/MODEL/CASE
    "over_best_ddp": ("ours_over_best_ddp", "all_reduce_over_compute", "best_ddp", *OF_ALL),
    "over_bound": ("ours_over_bound", "bound_contended"),
}


def ddp(**more: Any) -> Wrap:
    """Wraps a model with torch's DDP."""
    return lambda model, optimizer: (DistributedDataParallel(model, **more), None)


def fsdp(by_layer: bool) -> Wrap:
    """Shards a model with FSDP2: a group for each layer, or for each child of the model and of its sequences."""

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, None]:
        mesh, names = init_device_mesh("cpu", (2,)), {p: name for name, p in model.named_parameters()}
        model.to(memory_format=torch.contiguous_format)
        layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        children = [*model.children()]
        blocks = [part for child in children for part in (child if isinstance(child, nn.Sequential) else [child])]
        groups = layers if by_layer else [block for block in blocks if [*block.parameters()]]
        for module in (*groups, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        sharded = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group |= {"params": [sharded[names[p]] for p in group["params"]], "fused": False, "foreach": True}
        return model, None

    return wrap


def rank_main(case: str, work: Workload, budget_s: float, *, own: bool) -> None:
    """Each rank's part."""
    comm = connected()
    alone = Side(work, comm, lambda model, optimizer: (model, None))
    transfer = Transfer(comm.channel(), alone.model)
    for _ in range(5):  # memory is laid out, clocks are up
        alone()
    mbit = 0.0
    if MODES[case]:
        mbit = balance(comm, alone.once, transfer.once, MODES[case])

    def contended() -> None:
        transfer.start()
        alone()
        transfer.wait()

    hidden, barrier = Side(work, comm, ours(comm)), Side(work, comm, ours(comm, next_forward=False))
    for side in (barrier, hidden):
        side.plan()
    sides: dict[str, Callable[[], object]] = {}
    if own:
        sides["after"] = Side(work, comm, ours(comm, OneBucket(), next_forward=False))
    else:
        sides["sharded"] = sharded = Side(work, comm, ours(comm, shard=True))
        sides["planned"] = planned = Side(work, comm, ours(comm, Planned(shards=True)))
        for side in (sharded, planned):
            side.plan()
        viewed = partial(ddp, gradient_as_bucket_view=True, static_graph=True)
        sides["ddp"] = Side(work, comm, ddp())
        sides |= {f"ddp_{mb}": Side(work, comm, viewed(bucket_cap_mb=mb)) for mb in BUCKETS_MB}
        sides["ddp_growing"] = Side(work, comm, viewed(bucket_cap_mb_list=GROWING_MB))
        sides |= {f"fsdp_{name}": Side(work, comm, fsdp(name == "layer")) for name in ("layer", "block")}
    for step in sides.values():  # in one order on both ranks; DDP lays its buckets out anew after a step
        step()
    bounds = {"compute": alone, "all_reduce": transfer, "contended": contended}
    sides = {**bounds, **sides, "barrier": barrier, "ours": hidden}
    seconds = rounds(comm, sides, steps=STEPS, budget_s=budget_s)
    if comm.rank == 0:
        shares = not own and planned.job.kept("overlap").layout.plan.ranks > 1
        report(case, work, mbit, seconds, shares=shares)


def report(case: str, work: Workload, mbit: float, seconds: dict[str, list[float]], *, shares: bool) -> None:
    """The figures of the rounds."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rivals = [name for name in median if name.startswith(("ddp", "fsdp"))]
    bound = max(median["compute"], median["all_reduce"])
    figures: dict[str, object] = {
        "ours_over_bound": round(median["ours"] / bound, 4),
        "bound_contended": round(median["contended"] / bound, 4),
        "ours_over_barrier": round(median["ours"] / median["barrier"], 4),
        "all_reduce_over_compute": round(median["all_reduce"] / median["compute"], 4),
        "n": len(seconds["ours"]),
        "mbit": round(mbit, 1),
        "seconds": {name: {k: round(v, 4) for k, v in spread(values).items()} for name, values in seconds.items()},
    }
    claims: dict[str, tuple[str, ...]] = {}
    if rivals:
        best = min((name for name in rivals if name.startswith("ddp")), key=lambda name: median[name])
        best_of_all = min(rivals, key=lambda name: median[name])
        figures |= {f"{name}_over_best_ddp": round(median[name] / median[best], 4) for name in ("ours", "barrier")}
        figures |= {"best_ddp": best, "ours_over_best_ddp_spread": ratio(seconds["ours"], seconds[best])}
        figures |= {
            "best_of_all": best_of_all,
            "ours_over_best_of_all": round(median["ours"] / median[best_of_all], 4),
            "ours_over_best_of_all_spread": ratio(seconds["ours"], seconds[best_of_all]),
            "planned_shares": shares,
            "planned_over_best_of_all": round(median["planned"] / median[best_of_all], 4),
            "planned_over_best_of_all_spread": ratio(seconds["planned"], seconds[best_of_all]),
            "sharded_over_overlap": round(median["sharded"] / median["ours"], 4),
        }
        claims = {f"overlap/{work.model}/{case}/{k}": keys for k, keys in CLAIMS.items()}
    else:
        figures |= {f"{name}_over_after": round(median[name] / median["after"], 4) for name in ("ours", "barrier")}
        if not mbit:
            figures |= dict.fromkeys(("ours_over_after", "barrier_over_after", "ours_over_barrier"))
            figures["null_because"] = "the link is not shaped, so there is almost nothing to hide"
    parameters = {"case": case, "model": work.model, "batch": work.batch, "ranks": 2, "threads": 1, "steps": STEPS}
    finish("overlap", parameters, figures, claims)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=MODES, default="balanced")
    parser.add_argument("--model", choices=("resnet18", "alexnet", "vgg16"), default="resnet18")
    parser.add_argument("--batch", type=int, default=64, help="images a rank")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for the timed rounds")
    parser.add_argument("--own", action="store_true", help="three ways of ours instead of DDP")
    arguments = parse(parser)
    if arguments.own and os.geteuid() != 0:
        arguments.case = "compute_bound"
    if "RANK" not in os.environ:
        return on_hosts(__file__, sys.argv[1:], loopback=arguments.own and os.geteuid() != 0)
    rank_main(arguments.case, Workload(arguments.model, arguments.batch), arguments.seconds, own=arguments.own)
    return 0


if __name__ == "__main__":
    sys.exit(main())
