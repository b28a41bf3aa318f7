"""One replica of a training with torchft, for elastic.py: CIFAR ResNet-18 on random images.

    python benchmarks/elastic_torchft.py RANK LIGHTHOUSE FILE    (LIGHTHOUSE: an address; "serve": be it)

Gradients are averaged by `Manager.allreduce`: torchft's own DistributedDataParallel (0.2.0) ends the survivors with an
AssertionError where an all-reduce fails on torch 2.13. Each step that counts is a line in FILE: its number, when it
ended, how many replicas took part. Time-outs are as short as ran without false alarms here: a lost replica is given up
after HEARTBEAT_MS; an all-reduce fails after TIMEOUT.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kasoku.models import cifar_resnet18

BATCH, PORT, HEARTBEAT_MS, TIMEOUT = 16, 29541, 2000, timedelta(seconds=5)


def serve() -> None:
    """The lighthouse, which says who takes part."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"0.0.0.0:{PORT}", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    print(server.address(), flush=True)
    while True:
        time.sleep(60)


def train(rank: int, lighthouse: str, file: Path) -> None:
    """Trains until it is killed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = cifar_resnet18()
    store = dist.TCPStore(os.environ["KASOKU_HOST"], 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        checkpoint_transport=PGTransport(group, timeout=2 * TIMEOUT, device="cpu"),
        min_replica_size=1,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        replica_id=f"host{rank}",
        timeout=2 * TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=os.environ["KASOKU_HOST"],
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname=os.environ["KASOKU_HOST"],
    )
    params = [*model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = Optimizer(manager, sgd)
    x_NCHW, y_N = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x_NCHW), y_N).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        manager.allreduce(flat).wait()
        for p, mean in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True):
            p.grad = mean.view(p.shape)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            with file.open("a") as stream:
                stream.write(f"{manager.current_step()} {time.time()} {manager.num_participants()}\n")


if __name__ == "__main__":
    serve() if sys.argv[2] == "serve" else train(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
