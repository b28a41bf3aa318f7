"""The contracts of data sources."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from kasoku.data import Dataset, Memory, Split, loader, read_image
from kasoku.testing.contracts import Contracts


@dataclass(frozen=True)
class SourceRow:
    """A data source and its claims; let it be small, since all images are read.

    Args:
        name: in the names of tests.
        open: opens it, as a recipe would; it is opened several times.
    """

    name: str
    open: Callable[[], Dataset]


def _pixels(dataset: Dataset, *, threads: int = 1) -> list[torch.Tensor]:
    """The images of both splits as test images: pixels_NHWC (uint8)."""

    def image(split: Split, index: int) -> torch.Tensor:
        if isinstance(split, Memory):
            return split.images_NHWC[index]
        return read_image(split.read(index), dataset.image_size, dataset.channels, name=split.name(index))

    splits = (dataset.train, dataset.test)
    with ThreadPoolExecutor(threads) as pool:
        return [torch.stack(list(pool.map(partial(image, split), range(len(split))))) for split in splits]


class SourceContracts(Contracts):
    """What every data source holds. `rows`: a SourceRow for each source."""

    def test_every_image_has_a_label_of_a_named_class(self, row: SourceRow) -> None:
        dataset = row.open()
        assert all(isinstance(name, str) and name for name in dataset.classes)
        assert len(set(dataset.classes)) == len(dataset.classes)
        for split in (dataset.train, dataset.test):
            assert len(split) > 0
            assert split.labels_N.shape == (len(split),)
            assert split.labels_N.dtype == torch.int64
            assert set(split.labels_N.tolist()) <= set(range(len(dataset.classes)))

    def test_images_have_the_size_and_channels_that_it_says(self, row: SourceRow) -> None:
        dataset = row.open()
        assert len(dataset.mean) == len(dataset.std) == dataset.channels
        assert min(dataset.std) > 0
        for split in (dataset.train, dataset.test):
            if isinstance(split, Memory):
                assert split.images_NHWC.is_contiguous()
            else:
                assert all(isinstance(split.name(index), str) for index in range(len(split)))
        for pixels_NHWC in _pixels(dataset):
            assert pixels_NHWC.dtype == torch.uint8
            assert pixels_NHWC.shape[1:] == (*dataset.image_size, dataset.channels)

    def test_an_index_reads_the_same_image_each_time_in_any_thread(self, row: SourceRow) -> None:
        dataset = row.open()
        assert all(map(torch.equal, _pixels(dataset), _pixels(dataset, threads=4)))

    def test_opened_again_it_is_equal(self, row: SourceRow) -> None:
        first, second = row.open(), row.open()
        assert first.index() == second.index()
        assert all(map(torch.equal, _pixels(first), _pixels(second)))

    def test_an_epoch_has_every_image_once_in_an_order_of_the_seed(self, row: SourceRow) -> None:
        dataset = row.open()
        batch = next(size for size in range(min(64, len(dataset.train)), 0, -1) if len(dataset.train) % size == 0)
        epochs = [list(loader(dataset, "train", batch, seed=seed)) for seed in (3, 3)]
        labels_N = torch.cat([y_N for _, y_N in epochs[0]])
        assert torch.equal(labels_N.sort().values, dataset.train.labels_N.sort().values)
        for (x_NCHW, y_N), (again_NCHW, again_N) in zip(*epochs, strict=True):
            assert x_NCHW.shape == (batch, dataset.channels, *dataset.image_size)
            assert x_NCHW.isfinite().all()
            assert torch.equal(x_NCHW, again_NCHW)
            assert torch.equal(y_N, again_N)
