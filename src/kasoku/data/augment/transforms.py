"""Transforms of torchvision on training images: one image at a time in the loader's threads, or a batch on the device.

Note: random numbers. These transforms draw from torch's global generator, which the training uses too and all threads
share. A mode of torch, which acts on its own thread alone, gives each of their random operators a generator that is
seeded for the image or the batch. So threads do not meet in one generator, and the training's own does not move.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kasoku.core import InputError, Job, Stage, Technique, summary
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.shuffle import seed_of


@dataclass(frozen=True)
class Transforms(Technique, stage=Stage.DATA, changes_pixels=True, in_sandbox=False):
    """Runs random transforms of torchvision (v2) on training images, before Augment: the slow path of augmentation.

    A transform gets a uint8 tensor of RGB or grey values, (C, H, W), or (N, C, H, W) with `per = "batch"`, and returns
    one of the same shape and type. It may draw from torch's generators only. With `per = "image"` the result is a
    function of (seed, epoch, sample index), whatever the batch and the ranks; with "batch" of (seed, epoch, batch,
    rank, part), and torchvision draws once for all images of a part. The ledger has the seconds as "transforms": a row
    where the loop itself runs them (batches, images in memory), beside the rows where the threads that decode do.

    Args:
        transforms: tables with `use`, such as {use = "torchvision.transforms.v2.RandAugment", num_ops = 2}, run in this
            order; in Python also the transforms themselves.
        per: image: each image alone, on the CPU. Image files are transformed in the threads that decode them, which
            share Python's lock with the training. batch: all images of a batch at once, on the training device.

    Saves: epochs to an accuracy that the network without it only reaches with more images.
    Costs: several passes over each image in Python, on one CPU core; accuracy where epochs are few. Augment and Mix
        cost far less.
    Ref: RandAugment: Cubuk et al. 2019 (arXiv 1909.13719); TrivialAugment: Mueller & Hutter 2021 (arXiv 2103.10158);
        AugMix: Hendrycks et al. 2019 (arXiv 1912.02781).
    """

    transforms: tuple[Callable[..., Any], ...] = ()
    per: Literal["image", "batch"] = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "transforms", tuple(self.transforms))
        for each in self.transforms:
            if isinstance(each, type) or not callable(each):
                wanted = 'a table such as {use = "torchvision.transforms.v2.RandAugment"}, or in Python a transform'
                raise InputError(f"transforms: {each!r}: {wanted}, is wanted")

    def apply(self, job: Job) -> None:
        """Has the job's loader transform images. Raises InputError for a loader of others."""
        loader = own_loader(job, self)
        made = tuple(each() if hasattr(each, "use") else each for each in self.transforms)  # a table makes one
        if made:
            job.configure_loader(vary=Vary(made, loader.seed, self.per == "image"))


@dataclass(frozen=True)
class Vary:
    """Transforms uint8 images; a pure function of the images and of where they are in the training."""

    transforms: tuple[Callable[[Tensor], Tensor], ...]
    seed: int
    per_image: bool

    def __call__(self, images_NHWC: Tensor, index_N: Tensor, epoch: int, part: int) -> Tensor:
        """The images transformed, on their device. `part`: number of this part of a batch on all ranks in the epoch."""
        if not self.per_image:
            return self.run(images_NHWC, epoch, part)
        images = [self.run(x_HWC, epoch, i) for x_HWC, i in zip(images_NHWC.cpu(), index_N.tolist(), strict=True)]
        return torch.stack(images).to(images_NHWC.device) if images else images_NHWC

    def run(self, x_HWC: Tensor, epoch: int, number: int) -> Tensor:
        """An image transformed, by its sample index; or a batch, by its part's number."""
        x_CHW = x_HWC.movedim(-1, -3).contiguous()
        with torch.no_grad(), _OwnGenerators(seed_of(self.seed, epoch, number)):
            for transform in self.transforms:
                name, shape = getattr(transform, "__name__", type(transform).__name__), tuple(x_CHW.shape)
                try:
                    x_CHW = transform(x_CHW)
                except Exception as error:
                    raise InputError(f"Transforms: {name}: {summary(error)}") from error
                if not isinstance(x_CHW, Tensor) or (x_CHW.dtype, tuple(x_CHW.shape)) != (torch.uint8, shape):
                    got = f"{x_CHW.dtype} {tuple(x_CHW.shape)}" if isinstance(x_CHW, Tensor) else type(x_CHW).__name__
                    wanted = f"uint8 images of the same shape, {shape}, are wanted: the loader crops and normalises"
                    raise InputError(f"Transforms: {name} gave {got}; {wanted}")
        return x_CHW.movedim(-3, -1).contiguous()


class _OwnGenerators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has this thread's random operators draw from generators of its own, one a device, all of the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            first = args[0] if args and isinstance(args[0], Tensor) else None
            device = torch.device(kwargs.get("device") or (first.device if first is not None else "cpu"))
            if device not in self.generators:
                self.generators[device] = torch.Generator(device).manual_seed(self.seed)
            kwargs["generator"] = self.generators[device]
            overload = func.name().partition(".")[2]  # many operators have a second form, which takes a generator
            other = f"{overload}_generator" if overload else "generator"
            func = getattr(func.overloadpacket, other) if other in func.overloadpacket.overloads() else func
        return func(*args, **kwargs)
