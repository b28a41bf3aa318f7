import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from kasoku.core import InputError, Job
from kasoku.data import Augment, GrowBatch, Pipeline, Transforms, digits, folder, loader
from kasoku.data.augment.transforms import Vary
from kasoku.optim import sgd

NONE_OF_THEM = torch.zeros(1797, dtype=torch.bool)
OTHER = {
    "seed": 3,
    "shuffled": False,
    "images": 7,
    "left_out": NONE_OF_THEM,
    "batch": 6,
    "rank": 1,
    "size": 2,
    "shares": (2, 4),
    "parts": 3,
    "at_once": 2,
    "fill": True,
    "min_last": 4,
    "decoder": "nvjpeg",
    "threads": 5,
    "cores_shared_by": 2,
    "cache_bytes": 0,
    "device": torch.device("meta"),
    "vary": Vary((torch.nn.Identity(),), 0, True),
    "augment": Augment(flip="random"),
    "dtype": torch.bfloat16,
}


@pytest.fixture
def photos(tmp_path):
    """28 training images and 12 test images."""
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = Image.fromarray(np.full((40, 40, 3), 10 * number, np.uint8))
            pixels.save(tmp_path / "photos" / name / f"{number}.png")
    return folder(str(tmp_path / "photos"), size=32, validation=0.3)


def test_every_setting_of_a_pipeline_can_be_changed_by_its_name():
    plain = Pipeline(digits(), "train")
    assert plain.settings.keys() == OTHER.keys()
    for name, value in OTHER.items():
        changed = plain.with_(**{name: value})
        assert changed.settings == plain.settings | {name: value}
    assert plain.with_(**OTHER).settings == OTHER


def test_a_setting_that_a_pipeline_lacks_is_refused():
    with pytest.raises(TypeError, match=r"thread: no setting of a pipeline; these are: seed, shuffled, .*threads"):
        loader(digits(), "train", 8, thread=1)


def test_a_pipeline_cannot_be_written_to():
    pipeline = Pipeline(digits(), "train")
    for name in ("dataset", "batch", "threads"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(pipeline, name, None)
    with pytest.raises(AttributeError):
        loader(digits(), "train", 8).batch = 9


def test_what_configure_changed_is_undone_in_any_order():
    batches = loader(digits(), "train", 8)
    before = batches.pipeline.settings
    bigger, varied = batches.configure(batch=16, parts=2), batches.configure(augment=Augment(flip="random"))
    assert (batches.batch, batches.parts, batches.pipeline.augment.flip) == (16, 2, "random")
    bigger()
    assert (batches.batch, batches.parts, batches.pipeline.augment.flip) == (8, 1, "random")
    varied()
    assert batches.pipeline.settings == before


def test_an_augmentation_that_does_not_fit_changes_nothing():
    batches = loader(digits(), "train", 8)
    with pytest.raises(InputError, match="crop=random_resized: only for image files, digits is in memory"):
        batches.configure(augment=Augment(crop="random_resized"))
    assert batches.pipeline.augment == Augment()


def test_a_job_gives_the_pipeline_back_when_it_is_closed():
    batches = loader(digits(), "train", 8)
    before = batches.pipeline.settings
    varied = (Augment(flip="random"), GrowBatch(), Transforms((torch.nn.Identity(),)))
    job = Job(torch.nn.Flatten(), sgd, loader=batches).apply(*varied)
    assert batches.pipeline.settings != before
    job.close()
    assert batches.pipeline.settings == before
