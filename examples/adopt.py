"""A plain PyTorch loop, and what kasoku adds to it: the lines marked #+. Any DataLoader may be the loader.

python examples/adopt.py
torchrun --nproc-per-node 2 examples/adopt.py    # Overlap in the place of DistributedDataParallel
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kasoku.core import Job  # +
from kasoku.data import digits
from kasoku.distributed import Overlap, TorchComm, VirtualRanks  # + on several ranks
from kasoku.models import resnet18
from kasoku.optim import EMA  # +

BATCH = 64  # on all ranks together


def split(name: str) -> TensorDataset:
    """Digits of 32x32 pixels as a data set of torch's own."""
    part = getattr(digits(), name)
    pixels_NCHW = part.images_NHWC.permute(0, 3, 1, 2).float() / 255
    return TensorDataset(nn.functional.interpolate(pixels_NCHW, size=32, mode="bilinear") - 0.5, part.labels_N)


def main(epochs: int = 3) -> tuple[float, dict[str, Tensor]]:
    """Trains; returns the accuracy, and the averaged weights that it is of."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)
    train, test = split("train"), split("test")
    sampler = DistributedSampler(train, ranks, rank, seed=0)
    loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    model = resnet18(num_classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    if ranks == 1:
        job = Job(model, optimizer, loader=loader).apply(EMA(0.95))  # +
    else:  # BatchNorm over the images of all ranks, as SyncBatchNorm; without VirtualRanks over each rank's own
        job = Job(model, optimizer, loader=loader, comm=TorchComm())  # +
        job.apply(VirtualRanks(norm_batch=BATCH), Overlap(), EMA(0.95))  # +

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with job.evaluation() as averaged:  # + in the place of model.eval() and torch.no_grad(); puts the weights back
        weights = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
        right = sum(int((averaged(x).argmax(1) == y).sum()) for x, y in DataLoader(test, 360))
    accuracy = right / len(test)
    if rank == 0:
        print(f"top-1 {accuracy:.2%} of {len(test)} test images on {ranks} rank{'s' if ranks > 1 else ''}")
    return accuracy, weights


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # by torchrun
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
