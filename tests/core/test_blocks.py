"""What the blocks of a model are."""

from torch import nn

from kasoku.core.blocks import blocks


def test_stages_are_opened_and_all_parameters_are_in_some_block():
    stage = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(2, 2))
    model.add_module("stage", stage)
    model.add_module("head", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    found = blocks(model)
    assert [name for name, _ in found] == ["stem", "stage.0", "stage.1", "head"]
    inside = {p for _, block in found for p in block.parameters()}
    assert inside == set(model.parameters())


def test_a_backbone_is_opened_and_a_small_module_with_stages_is_not():
    def module(width):
        inner = nn.Module()
        inner.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width)) for _ in range(2)])
        return inner

    model = nn.Module()
    model.backbone, model.neck, model.head = nn.Module(), module(3), nn.Linear(2, 2)
    model.backbone.encoder, model.backbone.norm = module(30), nn.LayerNorm(30)
    names = [name for name, _ in blocks(model)]
    assert names == ["backbone.encoder.layers.0", "backbone.encoder.layers.1", "backbone.norm", "neck", "head"]
