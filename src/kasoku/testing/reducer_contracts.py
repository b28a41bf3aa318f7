"""The contracts of reducers, which average chunks of gradients over ranks: `Overlap(reducer=...)`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kasoku.core import Comm, Threads
from kasoku.distributed import Reducer
from kasoku.testing.contracts import Contracts
from kasoku.testing.toy import through_a_file

T = TypeVar("T")
_LENGTHS = (4096, 3001, 5, 1)  # of the chunks that are averaged in a step


@dataclass(frozen=True)
class ReducerRow:
    """A reducer and its claims.

    Args:
        reducer: its settings.
        tolerance: how far a mean may be from the true one, as a part of the mean's norm.
        ranks: the number of ranks on which it is tried.
    """

    reducer: Reducer
    tolerance: float = 1e-6
    ranks: int = 2

    @property
    def name(self) -> str:
        """The settings, in the names of tests."""
        return repr(self.reducer)

    def on_ranks(self, f: Callable[[Comm, Any], T]) -> list[T]:
        """The results of f(comm, the bound reducer) in rank order."""

        def rank(comm: Comm) -> T:
            reduce = self.reducer.bind(comm)
            result = f(comm, reduce)
            reduce.settle()
            return result

        return Threads(self.ranks).run(rank)


def _gradient(rank: int, step: int, n: int) -> Tensor:
    """The same on all ranks, and noise of a rank and a step."""
    common, own = (torch.Generator().manual_seed(seed) for seed in (n, 1000 * step + 10 * n + rank + 1))
    return torch.randn(n, generator=common) + 0.5 * torch.randn(n, generator=own)


def _step(comm: Comm, reduce: Any, step: int) -> list[Tensor]:
    """Starts to average all chunks, then waits for them in another order on each rank."""
    chunks = [_gradient(comm.rank, step, n) for n in _LENGTHS]
    works = [reduce(str(i), chunk) for i, chunk in enumerate(chunks)]
    for i in sorted(range(len(works)), reverse=comm.rank % 2 == 1):
        works[i].wait()
    return chunks


class ReducerContracts(Contracts):
    """What every reducer holds. `rows`: a ReducerRow for each reducer."""

    def test_all_ranks_get_the_same_bits_near_the_mean(self, row: ReducerRow) -> None:
        ranks = row.on_ranks(lambda comm, reduce: _step(comm, reduce, 0))
        for i, n in enumerate(_LENGTHS):
            assert all(torch.equal(ranks[0][i], other[i]) for other in ranks)
            mean = torch.stack([_gradient(rank, 0, n) for rank in range(row.ranks)]).mean(0)
            assert (ranks[0][i] - mean).norm() <= row.tolerance * mean.norm()

    def test_stopped_and_resumed_is_never_stopped_bit_for_bit(self, row: ReducerRow) -> None:
        whole = row.on_ranks(lambda comm, reduce: [_step(comm, reduce, step) for step in range(4)][-1])

        def first(comm: Comm, reduce: Any) -> Any:
            for step in range(3):
                _step(comm, reduce, step)
            return reduce.state_dict()

        saved = through_a_file(row.on_ranks(first))

        def second(comm: Comm, reduce: Any) -> list[Tensor]:
            reduce.load_state_dict(saved[comm.rank])
            return _step(comm, reduce, 3)

        for a, b in zip(whole, row.on_ranks(second), strict=True):
            assert all(map(torch.equal, a, b))

    def test_cleared_state_is_a_fresh_start(self, row: ReducerRow) -> None:
        def cleared(comm: Comm, reduce: Any) -> list[Tensor]:
            _step(comm, reduce, 0)
            reduce.load_state_dict({})
            return _step(comm, reduce, 0)

        fresh = row.on_ranks(lambda comm, reduce: _step(comm, reduce, 0))
        for a, b in zip(fresh, row.on_ranks(cleared), strict=True):
            assert all(map(torch.equal, a, b))
