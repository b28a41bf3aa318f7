"""kasoku's own techniques, data sources and reducers through the contracts that it ships (kasoku.testing)."""

from functools import partial

import pytest
import torch

from contracts import NO_ROW, ROWS, make, train
from helpers.photos import coloured_photos
from helpers.witnesses import shipped
from kasoku.data import Dataset, Items, digits, folder, shards
from kasoku.data.packs.writer import pack
from kasoku.device import Compile
from kasoku.distributed import Hierarchical, LowRank, Mean, Wire
from kasoku.testing import ReducerContracts, ReducerRow, SourceContracts, SourceRow, TechniqueContracts


class TestTechniques(TechniqueContracts):
    rows = ROWS


def test_every_technique_has_a_row():
    assert shipped() - {row.name for row in ROWS} - set(NO_ROW) == set()


def test_close_restores_the_recompile_limit():
    before = torch._dynamo.config.recompile_limit
    job = make(Compile(backend="eager"))
    train(job, 1)
    job.close()
    assert torch._dynamo.config.recompile_limit == before


class Photos:
    """A data set of somebody's own, with items."""

    def __init__(self, count: int) -> None:
        self.targets = [i % 3 for i in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 20, 20), 10 * index, dtype=torch.uint8), self.targets[index]


def items() -> Dataset:
    return Dataset("own", ("a", "b", "c"), Items(Photos(12)), Items(Photos(6)), 3, (16, 16), (0.5,) * 3, (0.2,) * 3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    here = tmp_path_factory.mktemp("sources")
    coloured_photos(here / "photos", images=8, side=24)
    pack(str(here / "photos"), str(here / "pack"), side=20, quiet=True)
    pack(str(here / "photos"), str(here / "raw"), side=20, format="raw", quiet=True)
    return here


class TestSources(SourceContracts):
    rows = (
        SourceRow("digits", digits),
        SourceRow("folder", partial(folder, "photos", 16)),
        SourceRow("items", items),
        SourceRow("pack", partial(shards, "pack", 16)),
        SourceRow("raw pack", partial(shards, "raw", 16)),
    )

    @pytest.fixture(autouse=True)
    def _beside_the_photos(self, photos, monkeypatch):
        monkeypatch.chdir(photos)


class TestReducers(ReducerContracts):
    rows = (
        ReducerRow(Mean()),
        ReducerRow(Wire(), tolerance=2**-8),
        ReducerRow(Wire("fp16"), tolerance=2**-11),
        ReducerRow(LowRank(min_elements=100), tolerance=1.0),
        ReducerRow(Hierarchical(2), ranks=4),
        ReducerRow(Hierarchical(2, Wire()), tolerance=2**-8, ranks=4),
    )
