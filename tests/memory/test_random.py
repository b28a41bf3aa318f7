"""SavedMemory on networks that nobody chose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.nets import FEW, assert_equal, assert_near, drawn, images, networks, one_step, smallest_budget
from kasoku.device import ChannelsLast
from kasoku.memory import SavedMemory


@FEW
@given(networks(), st.booleans(), st.integers(1, 5))
def test_lossless_gradients_of_any_network_are_equal_bit_for_bit(model, last, batch):
    x, y = images(batch, 16)
    layout = [ChannelsLast()] if last else []
    saved = SavedMemory(factor=1, lossless=True, in_backward=False, show=False)
    assert_equal(one_step(model, x, y, *layout), one_step(model, x, y, *layout, saved))


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.exhaustive)])
def test_gradients_of_any_network_under_the_smallest_budget_are_near(examples):
    @drawn(examples)
    @given(networks(), st.integers(5, 9))
    def near(model, batch):
        x, y = images(batch, 16)
        model, x = model.double(), x.double()
        saved = SavedMemory(budget=smallest_budget(model, x, y), in_backward=False, show=False)
        assert_near(one_step(model, x, y), one_step(model, x, y, saved), 1e-9)

    near()
