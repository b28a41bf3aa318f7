"""One decoding for several trainings."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator

from kasoku.data.loading.loader import Batches, Fetched, Loader

_KEPT = 4  # batches: who falls further behind decodes for itself


def shared(loader: Loader, members: int) -> list[Loader]:
    """So many loaders that give the same batches; each batch is decoded once while they keep step."""
    source = _Source()
    views = [copy.copy(loader) for _ in range(members)]
    for view in views:
        view.through = source.fetch
    return views


class _Source:
    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[int, int], Fetched] = OrderedDict()
        self.running: Iterator[Fetched] = iter(())
        self.next = (-1, -1)  # epoch and number of the batch that `running` gives next

    def fetch(self, loader: Loader, epoch: int, first: int) -> Batches:
        for number in range(first, len(loader)):
            if (epoch, number) not in self.kept:
                self._decode(loader, epoch, number)
            yield self.kept[epoch, number]

    def _decode(self, loader: Loader, epoch: int, number: int) -> None:
        if self.next != (epoch, number):
            self.running = loader.fetch(epoch, number)
        self.kept[epoch, number] = next(self.running)
        self.next = (epoch, number + 1)
        while len(self.kept) > _KEPT:
            self.kept.popitem(last=False)
