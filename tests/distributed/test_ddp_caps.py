"""The list of bucket sizes that `kasoku plan --buckets` prints gives DDP the buckets of the plan."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kasoku.distributed import Fixed, Graded, OneBucket, PerLayer, Policy
from kasoku.distributed.ddp.bucket_plan import MIB, ddp_caps
from kasoku.distributed.ddp.cost_model import Sized
from kasoku.models import cifar_resnet18


@pytest.mark.parametrize("policy", [OneBucket(), Graded(), Fixed(2 * MIB), Fixed(1000), PerLayer(0)], ids=repr)
def test_ddp_makes_the_planned_buckets(policy: Policy):
    parameters = list(cifar_resnet18().parameters())
    tensors = [Sized(i, p.numel(), p.nbytes) for i, p in enumerate(parameters)]
    plan = policy.plan(tensors)
    caps = [int(cap * 2**20) for cap in ddp_caps(plan, tensors)]  # as DDP rounds them
    ready = [i for bucket in plan.buckets for i in sorted(bucket, reverse=True)]  # the order in which gradients arrive
    made, _ = dist._compute_bucket_assignment_by_size([parameters[i] for i in ready], caps)
    assert [{ready[k] for k in bucket} for bucket in made] == [set(bucket) for bucket in plan.buckets]


def test_this_torch_has_the_argument():
    assert "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters
