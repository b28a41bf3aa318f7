"""How long does a simulation take?

    python benchmarks/simulate_speed.py

One process, one core: a step of ResNet-50 on 2,048 GPUs of ABCI by the groups and the hierarchical all-reduce of
[000], from a cluster and a network that are known (step_s); and a sweep over 1 to 4,096 of its GPUs, at least 40 sizes
(sweep_s), with no cache between sizes. Medians with spread.
Result: records/. Why it matters: a plan tries many sizes, and a user many what-ifs.
"""

from __future__ import annotations

import argparse

import torch

torch.set_num_threads(1)

from common import finish, parse, seconds_per_call, spread  # noqa: E402
from kasoku.distributed import Hierarchical  # noqa: E402
from kasoku.models import resnet50  # noqa: E402
from kasoku.simulate import Sharing, Simulator, collectives, load, model_costs  # noqa: E402
from kasoku.simulate.from_recipe import sizes  # noqa: E402
from kasoku.simulate.step import slowest  # noqa: E402

CLAIMS = {"simulate/speed/step": "step_s", "simulate/speed/sweep": "sweep_s"}
CACHES = (slowest, collectives.link, collectives.gather)  # of a size


def main() -> None:
    parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter))
    with torch.device("meta"):
        net = model_costs("resnet50", resnet50(), (3, 224, 224)).with_gradients(2)
    simulator = Simulator(load("abci"), net, Sharing(reducer=Hierarchical()))
    counts = sizes(simulator.cluster, 1, 4096)

    def forget() -> None:
        for known in CACHES:
            known.cache_clear()

    def step_once() -> None:
        forget()
        simulator.step(2048, 2048 * 42)

    def swept() -> None:
        forget()
        for gpus in counts:
            simulator.step(gpus, 42 * gpus)

    step = spread(seconds_per_call(step_once, calls=5))
    sweep = spread(seconds_per_call(swept, calls=3))
    print(f"a step {step['median']:.3f} s, {len(counts)} sizes {sweep['median']:.2f} s")
    figures = {"step_s": step["median"], "sweep_s": sweep["median"], "step_s_spread": step, "sweep_s_spread": sweep}
    finish("simulate_speed", {"gpus": 2048, "sizes": len(counts)}, figures, CLAIMS)


if __name__ == "__main__":
    main()
