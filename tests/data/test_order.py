import pytest
import torch

from kasoku.data import draws, order
from kasoku.data.loading.shuffle import whole

N = 40_000


def test_order_is_a_permutation_and_a_pure_function_of_its_arguments():
    state = torch.random.get_rng_state()
    assert order(1000, 3, 7).equal(order(1000, 3, 7))
    assert order(1000, 3, 7).sort().values.equal(torch.arange(1000))
    assert torch.random.get_rng_state().equal(state)
    orders = {tuple(order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_draws_do_not_depend_on_which_samples_are_drawn_together():
    index_N = torch.arange(100)
    together = draws(5, 2, index_N, 1)
    assert torch.cat([draws(5, 2, one, 1) for one in index_N.flip(0).split(7)]).flip(0).equal(together)
    assert draws(5, 2, index_N, torch.tensor([[0], [1]]))[1].equal(together)


@pytest.mark.parametrize("seed", [0, 1, -3, 2**40])
def test_draws_are_uniform(seed):
    u = draws(seed, 4, torch.arange(N), 2)
    assert u.dtype == torch.float32
    assert 0 <= u.min() < u.max() < 1
    assert u.mean().item() == pytest.approx(1 / 2, abs=0.006)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.002)
    counts = torch.histc(u, 50, 0, 1)
    assert ((counts - N / 50) ** 2 / (N / 50)).sum() < 95  # chi-squared, 49 degrees of freedom: p = 1e-4


def test_draws_of_neighbours_are_uncorrelated():
    index_N = torch.arange(N)
    u = draws(1, 5, index_N, 0)
    others = {
        "index": u.roll(1),
        "epoch": draws(1, 6, index_N, 0),
        "stream": draws(1, 5, index_N, 1),
        "seed": draws(2, 5, index_N, 0),
        "seed and epoch": draws(5, 1, index_N, 0),
    }
    for name, v in others.items():
        assert abs(torch.corrcoef(torch.stack([u, v]))[0, 1].item()) < 0.02, name


def test_whole_numbers_stay_in_range_at_the_largest_draw():
    largest = torch.tensor([0.0, 1 - 2**-24])
    for count in (1, 3, 9, 33, 1000, 3_000_000):
        assert whole(largest, count).tolist() == [0, count - 1]


def test_each_image_is_as_likely_at_each_place_of_an_epoch():
    """Chi-square over 60 places and images, and over pairs that follow each other."""
    n, epochs = 60, 3000
    count_NN, next_NN = torch.zeros(n, n), torch.zeros(n, n)
    for epoch in range(epochs):
        order_N = order(n, 1, epoch)
        count_NN[torch.arange(n), order_N] += 1
        next_NN[order_N[:-1], order_N[1:]] += 1
    for found_NN, cells in ((count_NN, n * n), (next_NN[~torch.eye(n, dtype=torch.bool)], n * (n - 1))):
        wanted = found_NN.sum().item() / cells
        chi = ((found_NN - wanted) ** 2 / wanted).sum().item()
        assert abs(chi - cells) < 6 * (2 * cells) ** 0.5
