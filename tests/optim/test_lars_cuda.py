"""LARS on a real GPU: the kernels as they are launched in training."""

import sys

import pytest
import torch

from helpers.published_lars import BIG, FORMS, SIZES, Tensors, assert_near, moved, random_grads
from kasoku.optim import Trust

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("way", ["triton", "foreach"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_as_published_on_the_device(way: str, form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["kasoku.optim.lars.lars"], "_path", lambda device: way)
    model = Tensors((*SIZES, BIG), vectors=(1, 64, 2047)).cuda()
    start = [p.detach().clone() for p in model.parameters()]
    rates = [300.0, 150.0, 300.0]
    grads = [[g.cuda() for g in some] for some in random_grads(model, len(rates))]
    settings = {"trust": Trust(form=form), "nesterov": True}
    torch.cuda.set_sync_debug_mode("error")  # nothing may make the host wait
    try:
        moved(model, grads, rates, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_near(model, start, grads, rates, **settings)


def test_a_step_on_a_side_stream_while_gradients_change_place(monkeypatch: pytest.MonkeyPatch):
    """Each step sends a new table while the last copy may be under way."""
    monkeypatch.setattr(sys.modules["kasoku.optim.lars.lars"], "_path", lambda device: "triton")
    model = Tensors(SIZES).cuda()
    start = [p.detach().clone() for p in model.parameters()]
    rates = [300.0] * 20
    grads = [[g.cuda() for g in some] for some in random_grads(model, len(rates))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moved(model, grads, rates)
    torch.cuda.current_stream().wait_stream(stream)
    assert_near(model, start, grads, rates, tolerance=1e-5)
