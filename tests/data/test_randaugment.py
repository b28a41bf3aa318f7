"""RandAugment: each change is Pillow's; which one an image gets depends on the image and the epoch alone."""

import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import nn

from contracts import assert_same, through_a_file, train, weights
from contracts import one_thread as one_thread
from kasoku.config.toml import parse, table
from kasoku.core import InputError, Job
from kasoku.data import Augment, Dataset, Memory, RandAugment, digits, loader
from kasoku.data.augment.randaugment import OPS, Changes, Vary
from kasoku.optim import sgd

MEAN = (0.485, 0.456, 0.406)
FILL = tuple(round(255 * m) for m in MEAN)
CPU = torch.device("cpu")


def photo(height: int = 60, width: int = 84) -> np.ndarray:
    """Something like a photo: shaded surfaces, edges, grain; neither black nor white in it. pixels_HWC."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:height, 0:width] / height
    shade = np.stack([0.3 + 0.4 * x, 0.7 - 0.4 * y, 0.4 + 0.2 * np.sin(6 * x + 4 * y)], 2)
    shade[(x - 0.5) ** 2 + (y - 0.4) ** 2 < 0.06] = (0.8, 0.35, 0.25)
    shade[int(0.7 * height) :, int(0.6 * width) :] *= 0.5
    image = Image.fromarray((255 * shade + rng.normal(0, 12, shade.shape)).clip(15, 240).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(0.6)))


def by_pillow(op: str, share: float, image: Image.Image) -> Image.Image:
    """The change by the library that everybody compares with; share: -1 to 1 of the greatest strength."""
    width, height = image.size
    fill = FILL if image.mode == "RGB" else FILL[0]

    def affine(*numbers: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, numbers, fillcolor=fill)

    plain = {
        "identity": lambda: image,
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "rotate": lambda: image.rotate(30 * share, fillcolor=fill),
        "solarize": lambda: ImageOps.solarize(image, 256 * (1 - abs(share))),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + 0.9 * share),
        "posterize": lambda: ImageOps.posterize(image, 8 - round(4 * abs(share))),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + 0.9 * share),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + 0.9 * share),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * share),
        "shear_x": lambda: affine(1, 0.3 * share, 0, 0, 1, 0),
        "shear_y": lambda: affine(1, 0, 0, 0.3 * share, 1, 0),
        "translate_x": lambda: affine(1, 0, 150 / 331 * width * share, 0, 1, 0),
        "translate_y": lambda: affine(1, 0, 0, 0, 1, 150 / 331 * height * share),
    }
    return plain[op]()


def ours(op: str, magnitude: float, down: bool, pixels_HWC: np.ndarray) -> np.ndarray:
    images_NCHW = torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1)[None]
    changes = Changes(magnitude, pixels_HWC.shape[:2], MEAN[: pixels_HWC.shape[2]], CPU)
    change_N = torch.tensor([2 * OPS.index(op) + down])
    return changes.apply(images_NCHW, change_N)[0].permute(1, 2, 0).numpy()


def tolerance(op: str) -> int:
    """Levels: integers are equal, of fractions a last bit may decide."""
    return int(op in ("autocontrast", "color", "contrast", "brightness", "sharpness"))


def furthest(a: np.ndarray, b: Image.Image) -> int:
    """The greatest difference in levels."""
    return int(np.abs(a.astype(int) - np.asarray(b).reshape(a.shape).astype(int)).max())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("magnitude", [0, 9, 17.5, 30])
@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_each_change_is_pillows(op: str, magnitude: float, down: bool):
    share = (-1 if down else 1) * magnitude / 30
    for pixels_HWC in (photo(), photo(33, 32), photo(50, 50)):
        assert furthest(ours(op, magnitude, down, pixels_HWC), by_pillow(op, share, Image.fromarray(pixels_HWC))) <= 1
        grey_HW = np.asarray(Image.fromarray(pixels_HWC).convert("L"))
        assert (
            furthest(ours(op, magnitude, down, grey_HW[..., None]), by_pillow(op, share, Image.fromarray(grey_HW))) <= 1
        )


@pytest.mark.data
def test_real_photos_change_as_pillow_changes_them(real_data):
    paths = sorted((real_data / "imagenette224" / "val").glob("*/*"))[::97][:6]
    assert paths
    for path in paths:
        with Image.open(path) as opened:
            image = opened.convert("RGB").crop((0, 0, 160, 160))
        for op in OPS:
            for down in (False, True):
                share = (-1 if down else 1) * 12 / 30
                far = furthest(ours(op, 12, down, np.asarray(image)), by_pillow(op, share, image))
                assert far <= tolerance(op), (path, op)


@pytest.mark.parametrize("value", [0, 7, 255])
@pytest.mark.parametrize("op", OPS)
def test_flat_and_tiny_images_change_as_pillow_changes_them(op: str, value: int):
    for height, width in ((1, 1), (2, 5), (3, 3), (9, 9)):
        flat_HWC = np.full((height, width, 3), value, np.uint8)
        assert furthest(ours(op, 9, False, flat_HWC), by_pillow(op, 0.3, Image.fromarray(flat_HWC))) <= tolerance(op)


def images(n: int = 60, height: int = 20, width: int = 24) -> torch.Tensor:
    whole = torch.from_numpy(photo(100, 120).copy())
    return torch.stack([whole[i : i + height, i // 2 : i // 2 + width] for i in range(n)])


def test_devices_that_are_not_asked_for_counts_get_the_same_images():
    images_NCHW, change_N = images().permute(0, 3, 1, 2), torch.arange(60) % 28
    changes = Changes(13.0, (20, 24), MEAN, CPU)
    apart = changes.apply(images_NCHW, change_N)
    one_by_one = [changes.apply(images_NCHW[i : i + 1], change_N[i : i + 1]) for i in range(60)]
    changes.alone = False
    assert torch.equal(apart, changes.apply(images_NCHW, change_N))
    assert torch.equal(apart, torch.cat(one_by_one))


def test_the_host_never_waits_for_the_device():
    """Tensors without values cannot be asked for any."""
    vary = Vary(RandAugment(), 0, MEAN)
    images_NHWC = torch.empty(5, 16, 16, 3, dtype=torch.uint8, device="meta")
    out_NHWC = vary(images_NHWC, torch.empty(5, dtype=torch.int64, device="meta"), 0)
    assert (out_NHWC.shape, out_NHWC.dtype) == (images_NHWC.shape, torch.uint8)


def test_what_an_image_gets_depends_on_seed_epoch_and_index_alone(monkeypatch):
    images_NHWC, index_N = images(), torch.arange(100, 160)
    vary = Vary(RandAugment(), 7, MEAN)
    whole = vary(images_NHWC, index_N, 3)
    for rows in torch.randperm(60).split(7):
        assert torch.equal(vary(images_NHWC[rows], index_N[rows], 3), whole[rows])
    assert not torch.equal(vary(images_NHWC, index_N, 4), whole)
    assert not torch.equal(vary(images_NHWC, index_N + 1, 3), whole)
    assert not torch.equal(Vary(RandAugment(), 8, MEAN)(images_NHWC, index_N, 3), whole)
    monkeypatch.setattr("kasoku.data.augment.randaugment._VALUES_CPU", 10 * 20 * 24 * 3)  # in parts of 10 images
    assert torch.equal(vary(images_NHWC, index_N, 3), whole)


def test_each_change_is_drawn_as_often_and_changes_follow_each_other(monkeypatch):
    drawn = []

    def noted(self, images_NCHW, change_N):
        drawn.append(change_N)
        return images_NCHW

    monkeypatch.setattr("kasoku.data.augment.randaugment.Changes.apply", noted)
    images_NHWC = torch.zeros(28_000, 1, 1, 3, dtype=torch.uint8)
    Vary(RandAugment(count=2), 0, MEAN)(images_NHWC, torch.arange(28_000), 0)
    assert len(drawn) == 2
    for change_N in drawn:
        assert np.abs(change_N.bincount(minlength=28).numpy() - 1000).max() < 150  # 4.8 standard deviations
    both = (28 * drawn[0] + drawn[1]).bincount(minlength=28 * 28)
    assert len(both) == 28 * 28
    assert both.min() > 0  # the second does not depend on the first


def test_no_change_writes_into_the_images_it_is_given():
    images_NHWC = images()
    before = images_NHWC.clone()
    Vary(RandAugment(count=3), 0, MEAN)(images_NHWC, torch.arange(60), 0)
    assert torch.equal(images_NHWC, before)
    assert Vary(RandAugment(), 0, MEAN)(images_NHWC[:0], torch.arange(0), 0).shape == (0, 20, 24, 3)


def job_on(*techniques, n: int = 60, comm=None) -> Job:
    split = Memory(images(n), torch.arange(n) % 4)
    dataset = Dataset("made", tuple("abcd"), split, split, 3, (20, 24), MEAN, (0.2, 0.2, 0.2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Job(model, sgd, loader=loader(dataset, "train", 12, seed=5, comm=comm)).apply(*techniques)


def test_it_comes_before_augment():
    varied, by_hand = job_on(RandAugment(), Augment(flip="random")).loader, job_on(Augment(flip="random")).loader
    vary, run = Vary(RandAugment(), 5, MEAN), by_hand.executor.run
    by_hand.executor.run = lambda pipeline, epoch, *more: (
        (vary(x, i, epoch), y, i) for x, y, i in run(pipeline, epoch, *more)
    )
    for _ in range(2):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(varied, by_hand, strict=True))
    assert not torch.equal(next(iter(varied))[0], next(iter(job_on(Augment(flip="random")).loader))[0])


def test_images_for_tests_and_statistics_are_not_varied():
    source, plain = job_on(RandAugment()).loader, job_on().loader
    assert torch.equal(torch.cat([x for x, _ in source.survey()]), torch.cat([x for x, _ in plain.survey()]))
    test, plain_test = loader(source.dataset, "test", 60), loader(source.dataset, "test", 60)
    test.configure(vary=source.pipeline.vary)
    assert torch.equal(next(iter(test))[0], next(iter(plain_test))[0])


def test_neutral_setting_is_identity_bit_for_bit():
    plain, neutral = job_on(), job_on(RandAugment(count=0))
    for job in (plain, neutral):
        train(job, 8)
    assert_same(weights(plain), weights(neutral))


def test_stopped_and_resumed_is_never_stopped():
    whole, first, second = (job_on(RandAugment()) for _ in range(3))
    train(whole, 12)
    train(first, 7)
    saved = through_a_file({"model": first.model.state_dict(), "job": first.state_dict()})
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["job"])
    train(second, 5)
    assert_same(weights(whole), weights(second))


@dataclass
class Rank:
    rank: int
    size: int


def test_ranks_see_what_one_rank_would():
    alone = torch.cat([x for x, _ in job_on(RandAugment()).loader])
    source = job_on().loader
    ranks = [loader(source.dataset, "train", 12, seed=5, comm=Rank(rank, 2)) for rank in range(2)]
    for one in ranks:
        Job(nn.Flatten(), sgd, loader=one).apply(RandAugment())
    shared = torch.cat([x for batches in zip(*ranks, strict=True) for x, _ in batches])
    assert torch.equal(alone, shared)


def test_close_gives_the_loader_back():
    job = job_on(RandAugment())
    assert job.loader.pipeline.vary is not None
    job.close()
    assert job.loader.pipeline.vary is None


@dataclass(frozen=True)
class Document:
    technique: RandAugment


def test_recipe_round_trip():
    document = Document(RandAugment(count=3, magnitude=12.5))
    assert parse(Document, tomllib.loads(tomli_w.dumps(table(document)))) == document


def test_what_it_does_not_fit_is_refused():
    with pytest.raises(InputError, match="count=-1: at least 0"):
        RandAugment(count=-1)
    for magnitude in (-1, 31, float("nan")):
        with pytest.raises(InputError, match=f"magnitude={magnitude}: at least 0 and at most 30"):
            RandAugment(magnitude=magnitude)
    with pytest.raises(InputError, match=r"give the job a kasoku\.data\.loader\(\.\.\.\), this is a list"):
        Job(nn.Flatten(), sgd, loader=[]).apply(RandAugment())
    two = Memory(torch.zeros(8, 4, 4, 2, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64))
    dataset = Dataset("two", ("a",), two, two, 2, (4, 4), (0.5, 0.5), (1.0, 1.0))
    with pytest.raises(InputError, match=r"images of 2 channels; grey \(1\) or RGB \(3\) are wanted"):
        Job(nn.Flatten(), sgd, loader=loader(dataset, "train", 4)).apply(RandAugment())


def test_grey_digits_are_varied():
    job = Job(nn.Flatten(), sgd, loader=loader(digits(), "train", 100)).apply(RandAugment())
    x, _ = next(iter(job.loader))
    assert x.isfinite().all()
    assert not torch.equal(x, next(iter(loader(digits(), "train", 100)))[0])


def test_it_uses_no_generator_of_others():
    state = torch.random.get_rng_state()
    Vary(RandAugment(), 0, MEAN)(images(), torch.arange(60), 0)
    assert torch.random.get_rng_state().equal(state)
