"""Trained runs, read back and evaluated."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from kasoku.config import libraries
from kasoku.config import recipe as recipes
from kasoku.config.recipe import Recipe
from kasoku.core import Comm, InputError, Job, Solo, say, summary
from kasoku.core.files import checked_file, expanded, is_number, load_weights, read_json
from kasoku.data import Dataset, Files, decode, loader
from kasoku.data.augment.basic import stored_side
from kasoku.data.datasets.tables import read_photos
from kasoku.data.loading.executor import Skipped
from kasoku.device import choose
from kasoku.device.select import Precision
from kasoku.distributed.consensus import iterate_on_all_ranks, run_on_all_ranks
from kasoku.distributed.environment import place
from kasoku.report import print_table
from kasoku.training.checkpoint import newest
from kasoku.training.evaluation import Scores, averaged, score
from kasoku.training.run_folder import load_recipe, members_of

_MOST = 256  # images of a batch, unless the recipe says how many
Classified = tuple[Path, list[tuple[str, float]], str]  # an image, its likeliest classes, why it cannot be read


@dataclass(frozen=True)
class Trained:
    """A trained network, in eval mode on its device, and the format of its images."""

    path: Path
    recipe: Recipe
    job: Job
    device: torch.device
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def logits(self, x_NCHW: Tensor) -> Tensor:
        """Logits_NK of normalised images on the device, with the recipe's test-time averaging."""
        with torch.no_grad():
            return averaged(self.job.model, x_NCHW, self.recipe.evaluate.views)


def load(path: Path, *, precision: Precision | None = None) -> Trained:
    """A trained run, or a folder for model hubs, with its best weights, or those of its newest good checkpoint.

    `precision`: what it computes in; None: as in training, so that its accuracy is that of the training. Raises
    InputError without weights, and for files that were changed.
    """
    recipe, data = load_recipe(path), checked_file(path, "data.json")
    if libraries.library_of(recipe.model) == "huggingface" and (path / "config.json").is_file():  # of a hub
        own = replace(recipe.model, keys={**recipe.model.keys, "model_name": str(path)})
        recipe = replace(recipe, model=own)
    try:
        facts = read_json(data)
        shown: dict[str, Any] = {k: tuple(facts[k]) for k in ("classes", "image_size", "mean", "std")}
        channels, sides, means = facts["channels"], shown["image_size"], shown["mean"] + shown["std"]
        good = len(sides) == 2 and all(type(n) is int and 0 < n < 2**31 for n in (channels, *sides))
        good = good and len(means) == 2 * channels and all(map(is_number, means)) and min(shown["std"]) > 0
        if not good or not all(isinstance(name, str) for name in shown["classes"]):
            raise ValueError("not the shape of any data")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{data}: damaged or missing ({summary(error)}): train again") from error
    model = recipes.network(recipe, len(shown["classes"]), channels, shown["image_size"][0], weights=False)
    weights = checked_file(path, "best.safetensors")
    if not weights.exists():
        saved = newest(path, warn=say)
        weights = saved / "model.safetensors" if saved else checked_file(path, "model.safetensors")  # of a hub
        if not weights.exists():
            raise InputError(f"{path}: no weights yet: let the training write a checkpoint first")
    load_weights(model, weights)
    plain: dict[str, Any] = {"kind": "auto", "compile": False, "graphs": False}
    device = replace(recipe.device, **plain, precision=precision or recipe.device.precision)
    here = place()
    chosen = choose(device, local_rank=here.local_rank, local_size=here.ranks_on_its_cores)
    job = Job(model.eval().to(chosen.device), recipe.optimizer, comm=Solo()).apply(*chosen.techniques)
    return Trained(path, recipe, job, chosen.device, channels=channels, **shown)


def load_members(paths: Sequence[Path], *, precision: Precision | None = None) -> list[Trained]:
    """These runs as an ensemble; the folder of an ensemble stands for its members.

    Raises InputError as `load`, and for runs that were trained on other data.
    """
    members = [load(run, precision=precision) for path in paths for run in members_of(path) or [path]]
    if not members:
        raise InputError("no run is given: give a run folder, or several")
    first = members[0]
    for other in members[1:]:
        if any(getattr(other, fact) != getattr(first, fact) for fact in ("classes", "image_size", "mean", "std")):
            raise InputError(f"{other.path}: trained on other data than {first.path}: an ensemble needs the same data")
    return members


def ensemble_logits(logits: Sequence[Tensor]) -> Tensor:
    """Logits_NK of an ensemble: the logarithm of the mean of its members' probabilities; of one member its own."""
    if len(logits) == 1:
        return logits[0]
    # not the logarithm of a mean: a probability that rounds to 0 would become -inf
    each_MNK = torch.stack([logits_NK.float().log_softmax(1) for logits_NK in logits])
    return each_MNK.logsumexp(0) - math.log(len(logits))


@dataclass(frozen=True, eq=False)
class _Unlabelled(Files):
    """Image files, decoded as those of a small data set, which a loader keeps; these are not kept."""

    side: int = 0

    def read(self, index: int) -> np.ndarray:  # type: ignore[override]
        return decode(super().read(index), self.side, name=self.paths[index])


def classify(members: Sequence[Trained], files: Sequence[Path], top: int) -> Iterator[Classified]:
    """Each image file with its `top` likeliest classes and their probabilities, or with why it cannot be read.

    A batch at a time; the next ones are decoded meanwhile. Several members give the mean of their probabilities.
    """
    first = members[0]
    size, count = first.image_size, len(files)
    images = _Unlabelled(tuple(map(str, files)), torch.zeros(count, dtype=torch.int64), side=stored_side(max(size)))
    facts = (first.channels, size, first.mean, first.std)
    dataset = Dataset("images", first.classes, images, images, *facts, max_bad_fraction=1.0)
    batch, start = first.recipe.evaluate.batch or min(_MOST, first.recipe.images_at_once(1)), 0
    batches = loader(dataset, "test", batch, device=first.device, cache_bytes=0)
    bad = cast(Skipped, batches.skipped).reasons
    for x_NCHW, _ in batches:
        known: dict[int, list[tuple[str, float]]] = {}
        if len(x_NCHW):
            logits_NK = ensemble_logits([member.logits(x_NCHW) for member in members])
            best = logits_NK.softmax(1)[:, : len(first.classes)].topk(min(top, len(first.classes)))
            rows = zip(batches.index_N.tolist(), best.values.tolist(), best.indices.tolist(), strict=True)
            known = {i: [(first.classes[k], p) for k, p in zip(ks, ps, strict=True)] for i, ps, ks in rows}
        for index in range(start, min(start + batch, count)):
            yield files[index], known.get(index, []), bad.get(index, "")
        start += batch


def score_runs(paths: Sequence[Path], data: Path | None = None, comm: Comm | None = None) -> list[tuple[str, Scores]]:
    """The scores of each run and, last, of several as an ensemble (mean of probabilities), with their names.

    The folder of an ensemble stands for its members. `data`: other test images, as `kasoku train --data` takes them.
    `comm`: the ranks, which share the images, and must all call it; one rank by default.
    """
    comm = comm or Solo()
    members = run_on_all_ranks(comm, lambda: load_members(paths))
    first = members[0]
    dataset = run_on_all_ranks(comm, lambda: _test_images(first, data))
    if data is None and any(member.recipe.data != first.recipe.data for member in members):
        say(f"tested on the test images of {first.path}, some of which the others may have trained on", comm.rank)
    batch = first.recipe.evaluate.batch or min(_MOST * comm.size, first.recipe.images_at_once(1))
    batches = loader(dataset, "test", batch + -batch % comm.size, device=first.device, comm=comm)

    def outputs(x_NCHW: Tensor, _: Tensor) -> list[Tensor]:
        logits = [member.logits(x_NCHW).float() for member in members]
        return [*logits, ensemble_logits(logits)]

    scores = score(outputs, iterate_on_all_ranks(comm, batches), comm, count=len(members) + 1)
    if batches.skipped and batches.skipped.reasons:
        say(f"{len(batches.skipped.reasons)} images skipped: {batches.skipped.summary()}")
    names = [str(member.path) for member in members] + [f"ensemble of {len(members)}"] * (len(members) > 1)
    return list(zip(names, scores, strict=False))


def print_scores(scores: Sequence[tuple[str, Scores]]) -> None:
    """Prints top-1, top-5 and loss as a table."""
    rows = [(name, f"{each.top1:.2%}", f"{each.top5:.2%}", f"{each.loss:.4f}") for name, each in scores]
    print_table(f"{scores[0][1].images:,} test images", rows, ("run", "top-1", "top-5", "loss"))


def _test_images(trained: Trained, data: Path | None) -> Dataset:
    if data is None:
        dataset = recipes.checked(trained.recipe.data(), Dataset, "data")
    else:
        data = expanded(data)
        _, photos = read_photos(str(data), trained.image_size[0])
        if photos.undivided and not (data / "train").is_dir():  # no test part: all images are tested
            photos = replace(photos, test=photos.undivided)
        dataset = replace(photos, channels=trained.channels)
    dataset = replace(dataset, mean=trained.mean, std=trained.std)
    if unlike := sorted(set(dataset.classes) ^ set(trained.classes))[:3]:
        got = f"other classes than {trained.path} was trained on ({', '.join(unlike)})"
        raise InputError(f"{data or trained.recipe.data.use}: {got}: the same class names are wanted")
    if dataset.classes != trained.classes:  # of another source, which has its own order
        number_K = torch.tensor([trained.classes.index(name) for name in dataset.classes])
        test = copy.copy(dataset.test)
        object.__setattr__(test, "labels_N", number_K[test.labels_N])
        dataset = replace(dataset, classes=trained.classes, test=test)
    return dataset
