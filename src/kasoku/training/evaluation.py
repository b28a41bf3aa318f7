"""Top-1, top-5 and loss of a model over a loader, with test-time averaging; and when a training is evaluated.

What follows from its scores: the best weights, the target, the logs. Its predictions: counts of (label, predicted
class), and the images with the largest loss.
"""

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from kasoku.config.ranks import UNSURE
from kasoku.core import Batch, Comm, InputError, Solo
from kasoku.data import Dataset, GoneError, Loader, Memory, read_image
from kasoku.distributed.consensus import iterate_on_all_ranks
from kasoku.optim.loss import logits_of
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import RunState

Views = Literal["plain", "mirror", "crops"]
_THUMBNAIL = 96  # pixels, the longer side


@dataclass(frozen=True)
class Scores:
    """Fractions from 0 to 1, the mean cross-entropy, and the number of images."""

    top1: float
    top5: float
    loss: float
    images: int


def evaluate(
    model: Callable[[Tensor], Tensor],
    loader: Iterable[Batch],
    views: Views = "plain",
    comm: Comm | None = None,
    *,
    also: Callable[[Tensor, Tensor], object] | None = None,
) -> Scores:
    """Scores of a model in eval mode (`with job.evaluation() as model`). Collective with a `comm`; does not drain.

    Args:
        model: x_NCHW -> logits_NK.
        loader: one pass over the test images; on several ranks this rank's share: at least one batch, of no images
            if it has none.
        views: see `averaged`.
        comm: the ranks that share the images. Their sums are added, so each image counts once and all ranks get the
            same scores; one rank by default.
        also: called with logits_NK and y_N of each batch.
    """

    def outputs(x_NCHW: Tensor, y_N: Tensor) -> list[Tensor]:
        logits_NK = averaged(model, x_NCHW, views)
        if also is not None:
            also(logits_NK, y_N)
        return [logits_NK]

    return score(outputs, loader, comm or Solo())[0]


def score(
    outputs: Callable[[Tensor, Tensor], Sequence[Tensor]], loader: Iterable[Batch], comm: Comm, *, count: int = 1
) -> list[Scores]:
    """The scores of each of the `count` logits_NK that outputs(x_NCHW, y_N) gives; otherwise as `evaluate`."""
    totals: Tensor | None = None
    images = 0
    for x_NCHW, y_N in loader:
        if totals is None:
            exact = torch.float32 if x_NCHW.device.type == "mps" else torch.float64  # MPS has no float64
            totals = torch.zeros(count, 4, dtype=exact, device=x_NCHW.device)  # hits at 1 and 5, loss, images
        for i, logits_NK in enumerate(outputs(x_NCHW, y_N) if len(y_N) else ()):
            hits_N5 = logits_NK.topk(min(5, logits_NK.shape[1]), dim=1).indices == y_N[:, None]
            loss = nn.functional.cross_entropy(logits_NK.float(), y_N, reduction="sum")
            totals[i, :3] += torch.stack([hits_N5[:, 0].sum(), hits_N5.sum(), loss])
        images += len(y_N)
    if totals is None:
        return [Scores(0.0, 0.0, float("nan"), 0)] * count
    totals[:, 3] = images
    comm.all_reduce(totals).wait()
    rows = totals.tolist()  # the one time the host waits for the device
    return [Scores(a / max(1, n), b / max(1, n), loss / n if n else math.nan, int(n)) for a, b, loss, n in rows]


def averaged(model: Callable[[Tensor], Tensor], x_NCHW: Tensor, views: Views) -> Tensor:
    """Logits averaged over views of the same images.

    plain: the images alone. mirror: also mirrored. crops: more views of the unsure 30 % of a batch (rounded up), whose
    first class leads the second by least: mirrored, and shifted by one pixel both ways along the diagonal, each also
    mirrored. The shifted views together weigh as much as the unshifted ones.
    Ref: crops: Jordan 2024 (arXiv 2404.00498); only uncertain images: Hiverge 2025 (cifar10-speedrun).
    """
    logits_NK = logits_of(model(x_NCHW if views == "plain" else _channels_last(x_NCHW)))
    if views == "mirror":
        return _with_mirror(model, x_NCHW, logits_NK)
    unsure = math.ceil(UNSURE * len(x_NCHW))
    if views == "crops" and unsure and logits_NK.shape[1] > 1:
        best_N2 = logits_NK.softmax(1).topk(2, dim=1).values
        index_M = (best_N2[:, 0] - best_N2[:, 1]).topk(unsure, largest=False).indices
        height, width = x_NCHW.shape[2:]
        x_MCHW = x_NCHW[index_M]
        padded = nn.functional.pad(x_MCHW, (1, 1, 1, 1), mode="reflect")
        shifted = [padded[:, :, :height, :width], padded[:, :, 2:, 2:]]
        logits_MK = _with_mirror(model, x_MCHW, logits_NK[index_M])
        shifted_MK = sum(_with_mirror(model, x, logits_of(model(x))) for x in map(_channels_last, shifted)) / 2
        logits_NK[index_M] = (logits_MK + shifted_MK) / 2
    return logits_NK


def _channels_last(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def _with_mirror(model: Callable[[Tensor], Tensor], x_NCHW: Tensor, logits_NK: Tensor) -> Tensor:
    """The mean of the images' own logits and those of their mirror images."""
    return (logits_NK + logits_of(model(_channels_last(x_NCHW.flip(3))))) / 2


class PredictionLog:
    """The predictions of one evaluation. They stay on the device until `gather`, so that no batch waits for a copy.

    `loader`: of the batches; it has the indices of the last one.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._rows: list[tuple[Tensor, ...]] = []  # loss, index, label, predicted class of each batch
        self._outputs = 0

    def add(self, logits_NK: Tensor, y_N: Tensor) -> None:
        loss_N = nn.functional.cross_entropy(logits_NK.float(), y_N, reduction="none")
        self._rows.append((loss_N, self._loader.index_N.clone(), y_N.clone(), logits_NK.argmax(1)))
        self._outputs = logits_NK.shape[1]

    def gather(self, dataset: Dataset, comm: Comm, *, worst: int = 16) -> dict[str, Any]:
        """The predictions of all ranks as {"classes", "confusion", "worst"}. Collective: all ranks call it.

        `confusion`: [label, predicted, images] for each pair that occurred, sorted. `worst`: the images with the
        largest loss, largest first, with name, label, predicted, loss and a thumbnail (`png`, base64; empty if it
        cannot be drawn). Only rank 0 draws thumbnails.
        """
        mine: list[tuple[float, int, int, int]] = []
        seen: Counter[tuple[int, int]] = Counter()
        if self._rows:
            columns = [torch.cat(batches).cpu() for batches in zip(*self._rows, strict=True)]
            largest = columns[0].topk(min(worst, len(columns[0]))).indices
            mine = list(zip(*(column[largest].tolist() for column in columns), strict=True))
            seen.update(zip(columns[2].tolist(), columns[3].tolist(), strict=True))
        gathered = comm.gather_objects((self._outputs, mine, seen))
        side = max(len(dataset.classes), *(outputs for outputs, _, _ in gathered))
        counts = sum((theirs for _, _, theirs in gathered), Counter[tuple[int, int]]())
        names = [*dataset.classes, *(f"output {i}" for i in range(len(dataset.classes), side))]
        images = sorted((image for _, images, _ in gathered for image in images), reverse=True)[:worst]
        part = dataset.test
        pictures = _thumbnails(dataset, [index for _, index, _, _ in images] if comm.rank == 0 else [])
        return {
            "classes": names,
            "confusion": [[*pair, n] for pair, n in sorted(counts.items())],
            "worst": [
                {
                    "name": f"image {index}" if isinstance(part, Memory) else part.name(index),
                    "label": names[label],
                    "predicted": names[predicted],
                    "loss": round(loss, 4) if math.isfinite(loss) else None,
                    "png": pictures.get(index, ""),
                }
                for loss, index, label, predicted in images
            ],
        }


def _thumbnails(dataset: Dataset, index: list[int]) -> dict[int, str]:
    """PNG files as base64, by index. Images that cannot be read are left out; if their source is gone, the rest too."""
    part, thumbnails = dataset.test, {}
    for i in index:
        try:
            if isinstance(part, Memory):
                pixels_HWC = part.images_NHWC[i].cpu()
            else:
                pixels_HWC = read_image(part.read(i), dataset.image_size, name=part.name(i))
            if pixels_HWC.shape[2] not in (1, 3):
                continue
            image = Image.fromarray(pixels_HWC.squeeze(2).contiguous().numpy())
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            out = io.BytesIO()
            image.save(out, "PNG")
        except GoneError:
            break  # a training does not wait at its end for pictures
        except (InputError, IndexError, OSError, ValueError, TypeError):
            continue
        thumbnails[i] = base64.b64encode(out.getvalue()).decode("ascii")
    return thumbnails


class Validation:
    """The evaluations of one training, on its test images."""

    def __init__(self, state: RunState, metrics: Metrics) -> None:
        self.state, self.job, self.metrics, self.settings = state, state.job, metrics, state.recipe.evaluate
        self._predictions: PredictionLog | None = None  # of the last evaluation
        self.last_step = -1  # of the last evaluation

    def run_if_due(self) -> None:
        """Evaluates if the last step crossed a multiple of `evaluate.every` epochs, or the training is over.

        Collective; drains if it evaluates.
        """
        every, progress = self.settings.every, self.state.progress
        crossed = int(self.job.progress / every + 1e-9) > int(progress.last_evaluation / every + 1e-9)
        if self.state.over or (crossed and self.job.progress >= self.settings.start):
            self.run()
        if crossed:  # afterwards, so that a resumed training repeats an evaluation that failed
            progress.last_evaluation = self.job.progress

    def run(self) -> None:
        """Evaluates the model as it would be used: averaged, with the statistics measured for it. Collective; drains.

        Writes best.safetensors if it is the best so far, and model.safetensors if the training is over.
        """
        state, job, progress, metrics = self.state, self.job, self.state.progress, self.metrics
        metrics.read()
        images_per_s, epoch = metrics.images_per_s(), round(job.progress, 4)
        metrics.log.mlperf("eval_start", event="INTERVAL_START", epoch_num=epoch)
        with state.busy("evaluate"), job.evaluation() as model:
            self._predictions = PredictionLog(state.training.test)
            scores = self._scores(model, self._predictions.add)
            if scores.top1 > progress.best or not progress.scores:
                state.write(lambda run: run.write_weights("best.safetensors", model))
            reached = bool(self.settings.target) and scores.top1 >= self.settings.target
            state.target_reached = state.target_reached or (reached and self.settings.stop)
            if state.over:
                state.write(lambda run: run.write_weights("model.safetensors", model))
        self.last_step = job.steps
        progress.best = max(progress.best, scores.top1)
        progress.scores = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss}
        metrics.note({f"test_{name}": score for name, score in progress.scores.items()})
        if self.settings.stale:
            with state.busy("evaluate"), job.evaluation(renew_statistics=False) as model:
                stale = self._scores(model).top1
            metrics.note({"test_stale_top1": stale})
            lost = f"{100 * (scores.top1 - stale):.2f} points ({stale:.2%} with them)"
            metrics.bar.say(f"accuracy lost to stale averages: {lost}")
        metrics.log.mlperf("eval_accuracy", scores.top1, epoch_num=epoch)
        metrics.log.mlperf("eval_stop", event="INTERVAL_END", epoch_num=epoch)
        metrics.bar.accuracy(job.progress, scores.top1, loss=metrics.loss, images_per_s=images_per_s)
        if reached and progress.reached_s is None:
            progress.reached_s = metrics.seconds()

    def write_predictions(self) -> None:
        """Writes classes.json of the last evaluation. Collective."""
        if self._predictions:
            with self.state.busy("evaluate"):
                classes = self._predictions.gather(self.state.training.dataset, self.job.comm)
            self.state.write(lambda run: run.write("classes.json", json.dumps(classes) + "\n"))

    def _scores(self, model: nn.Module, also: Callable[[Tensor, Tensor], object] | None = None) -> Scores:
        test = iterate_on_all_ranks(self.job.comm, self.state.training.test)
        return evaluate(model, test, self.settings.views, self.job.comm, also=also)
