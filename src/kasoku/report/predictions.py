"""The predictions of an evaluation: counts of (label, predicted class), and the images with the largest loss."""

import base64
import io
import math
from collections import Counter
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from kasoku.core import Comm, InputError
from kasoku.data import Dataset, GoneError, Loader, Memory, read_image

_THUMBNAIL = 96  # pixels, the longer side


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
