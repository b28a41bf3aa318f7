import numpy as np
import pytest
import torch

from kasoku.core import InputError, Job
from kasoku.data import Augment, Transform, digits, draws, loader, normalise
from kasoku.data.augment import basic as augment
from kasoku.data.augment.basic import centre_box, random_box
from kasoku.data.decode import native
from kasoku.data.loading.shuffle import whole

MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)


def images(n=40, height=10, width=8, channels=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator)


def transform(**settings):
    return Transform(Augment(**settings), 7, MEAN, STD)


def moves(n, most, epoch, flip):
    """What the augmentation of sample 0..n-1 has to be, from the draws."""
    index_N = torch.arange(n)
    y = whole(draws(7, epoch, index_N, 1), 2 * most + 1)
    x = whole(draws(7, epoch, index_N, 2), 2 * most + 1)
    return y.tolist(), x.tolist(), (draws(7, epoch, index_N, 0) < 0.5).tolist() if flip else [False] * n


def test_normalise_matches_the_definition_and_is_channels_last():
    x_NHWC = images()
    x_NCHW = normalise(x_NHWC, MEAN, STD)
    want = ((x_NHWC.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()).permute(0, 3, 1, 2)
    torch.testing.assert_close(x_NCHW.double(), want, atol=2e-6, rtol=1e-6)
    assert x_NCHW.is_contiguous(memory_format=torch.channels_last)
    assert normalise(x_NHWC, MEAN, STD, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.skipif(not native.LIBRARY, reason="the pieces of C were not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 9, 11, 3), (3, 4, 5, 1), (2, 3, 7, 4), (0, 8, 8, 3), (9, 240, 320, 3)], ids=str)
@pytest.mark.parametrize("flip", [False, True])
def test_batches_looked_up_in_c_are_bit_for_bit_those_of_torch(dtype, shape, flip, monkeypatch):
    x_NHWC = images(*shape)
    mean, std = (0.1, 0.2, 0.3, 0.4)[: shape[3]], (0.5, 0.25, 0.125, 0.2)[: shape[3]]
    flip_N = torch.arange(shape[0]) % 3 == 0 if flip else None
    calls, in_c = [], native.look_up
    monkeypatch.setattr(native, "look_up", lambda *given: calls.append(1) or in_c(*given))
    found = normalise(x_NHWC, mean, std, dtype, flip_N=flip_N)
    assert calls
    monkeypatch.setattr(native, "LIBRARY", None)
    want = normalise(x_NHWC, mean, std, dtype, flip_N=flip_N)
    assert found.equal(want)
    assert (found.stride(), found.dtype) == (want.stride(), dtype)
    if flip and len(x_NHWC):
        assert want[0].equal(normalise(x_NHWC[:1], mean, std, dtype)[0].flip(2))
        assert want[1].equal(normalise(x_NHWC[1:2], mean, std, dtype)[0])


def test_what_c_does_not_take_torch_does_or_refuses():
    x_NHWC = images(4)
    assert normalise(x_NHWC.float(), MEAN, STD).equal(normalise(x_NHWC, MEAN, STD))
    assert normalise(x_NHWC[:, ::2], MEAN, STD).equal(normalise(x_NHWC[:, ::2].clone(), MEAN, STD))
    with pytest.raises(RuntimeError):
        normalise(x_NHWC, (0.5,), (0.25,))


def test_normalise_does_not_look_at_torchs_defaults():
    x_NHWC = images(4)
    want = normalise(x_NHWC, (0.3, 0.2, 0.1), STD)
    augment._table.cache_clear()
    augment._row_constants.cache_clear()
    with torch.device("meta"):
        assert normalise(x_NHWC, (0.3, 0.2, 0.1), STD).equal(want)
    torch.set_default_dtype(torch.float64)
    try:
        augment._table.cache_clear()
        augment._row_constants.cache_clear()
        assert normalise(x_NHWC, (0.3, 0.2, 0.1), STD).equal(want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flip", ["none", "random"])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_translate_equals_reflect_padding_and_cropping(channels, flip, most):
    x_NHWC = images(channels=channels)
    n, height, width, _ = x_NHWC.shape
    ys, xs, flips = moves(n, most, 3, flip == "random")
    want = []
    for image, y, x, mirrored in zip(x_NHWC.numpy(), ys, xs, flips, strict=True):
        padded = np.pad(image, ((most, most), (most, most), (0, 0)), "reflect")
        padded = padded[:, ::-1] if mirrored else padded
        want.append(padded[y : y + height, x : x + width])
    mean, std = MEAN[:channels], STD[:channels]
    got = Transform(Augment(flip=flip, translate=most), 7, mean, std)(x_NHWC, torch.arange(n), 3)
    assert got.equal(normalise(torch.from_numpy(np.stack(want)), mean, std))


def test_neutral_augment_is_the_identity():
    assert transform()(images(), torch.arange(40), 5).equal(normalise(images(), MEAN, STD))


def test_random_flip_mirrors_about_half_and_anew_each_epoch():
    x_NHWC, plain = images(400), normalise(images(400), MEAN, STD)
    flipped = [
        (transform(flip="random")(x_NHWC, torch.arange(400), e) == plain.flip(3)).flatten(1).all(1) for e in (0, 1)
    ]
    assert 150 < flipped[0].sum() < 250
    assert 150 < (flipped[0] ^ flipped[1]).sum() < 250


def test_alternating_flip_is_random_first_and_then_alternates():
    x_NHWC = images(400)
    plain = normalise(x_NHWC, MEAN, STD)
    epochs = [transform(flip="alternating")(x_NHWC, torch.arange(400), epoch) for epoch in range(4)]
    assert 150 < (epochs[0] == plain).flatten(1).all(1).sum() < 250
    assert epochs[1].equal(epochs[0].flip(3))
    assert epochs[2].equal(epochs[0])
    assert epochs[3].equal(epochs[1])


def test_cutout_fills_one_square_with_the_mean():
    x_NHWC = images(300, 16, 16) // 2 + 100  # nothing is near the mean by itself
    cut = (transform(cutout=5)(x_NHWC, torch.arange(300), 1) == 0).all(1)
    rows, columns = cut.any(2).sum(1), cut.any(1).sum(1)
    assert cut.sum((1, 2)).equal(rows * columns)
    assert rows.max() == columns.max() == 5
    assert min(rows.min(), columns.min()) == 3  # centred on the border, the rest is lost outside
    untouched = transform()(x_NHWC, torch.arange(300), 1)
    assert torch.where(cut[:, None], 0, untouched).equal(transform(cutout=5)(x_NHWC, torch.arange(300), 1))


def test_augmentation_does_not_depend_on_the_batch():
    x_NHWC, all_of_it = images(), transform(flip="random", translate=2, cutout=3)
    whole_batch = all_of_it(x_NHWC, torch.arange(40), 9)
    parts = [all_of_it(x_NHWC[part], part, 9) for part in torch.arange(40).split(7)]
    assert torch.cat(parts).equal(whole_batch)


def test_an_empty_batch_stays_empty():
    x = transform(flip="random", translate=2, cutout=3)(images()[:0], torch.arange(0), 0)
    assert x.shape == (0, 3, 10, 8)


def test_random_box_stays_inside_and_keeps_area_and_ratio():
    u_N4 = torch.stack([draws(0, 0, torch.arange(2000), s) for s in range(4)], 1).tolist()
    areas = []
    for u_4 in u_N4:
        left, top, right, bottom = random_box(300, 200, u_4, 0.25)
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
        assert 0.74 < (right - left) / (bottom - top) < 1.34
        areas.append((right - left) * (bottom - top) / 60_000)
    assert min(areas) == pytest.approx(0.25, abs=0.02)
    assert 0.45 < np.mean(areas) < 0.65
    assert random_box(1, 5000, [0.5] * 4, 0.08)[2] <= 1


def test_centre_box_is_seven_eighths_unless_the_size_fits():
    assert centre_box(224, 224, (224, 224)) == (0, 0, 224, 224)
    assert centre_box(341, 256, (224, 224)) == (58, 16, 282, 240)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flip": "sometimes"}, "flip=sometimes: one of none, random, alternating"),
        ({"crop": "five"}, "crop=five: one of center, random_resized"),
        ({"translate": -1}, "translate=-1: 0"),
        ({"cutout": -2}, "cutout=-2: 0"),
        ({"scale_min": 0.0}, "scale_min=0.0: more than 0"),
    ],
)
def test_wrong_settings_are_one_clear_line(settings, message):
    with pytest.raises(InputError, match=message):
        Augment(**settings)


def job(batches):
    model = torch.nn.Linear(1, 1)
    return Job(model, torch.optim.SGD(model.parameters()), loader=batches)


def test_augment_as_a_technique_changes_the_loader_and_close_restores_it():
    batches = loader(digits(), "train", 100)
    plain = batches.pipeline.augment
    with_it = job(batches).apply(Augment(flip="random"))
    assert batches.pipeline.augment == Augment(flip="random")
    with_it.close()
    assert batches.pipeline.augment is plain


def test_augment_refuses_what_it_does_not_fit():
    with pytest.raises(InputError, match="translate=8: at most 7 for images of 8 pixels"):
        job(loader(digits(), "train", 100)).apply(Augment(translate=8))
    with pytest.raises(InputError, match=r"crop=random_resized: only for image files.*use translate"):
        job(loader(digits(), "train", 100)).apply(Augment(crop="random_resized"))
    with pytest.raises(InputError, match=r"Augment: give the job a kasoku\.data\.loader\(\.\.\.\), this is a list"):
        job([]).apply(Augment())


def test_transform_uses_no_global_generator():
    state = torch.random.get_rng_state()
    transform(flip="random", translate=2, cutout=3)(images(), torch.arange(40), 0)
    assert torch.random.get_rng_state().equal(state)


def test_jitter_moves_brightness_and_contrast_by_at_most_its_setting():
    images_NHWC = torch.full((400, 4, 4, 3), 128, dtype=torch.uint8)
    index_N = torch.arange(400)
    plain = Transform(Augment(), 0, (0.5,) * 3, (0.25,) * 3)(images_NHWC, index_N, 0)
    varied = Transform(Augment(jitter=0.2), 0, (0.5,) * 3, (0.25,) * 3)(images_NHWC, index_N, 0)
    moved_N = (varied - plain)[:, 0, 0, 0]
    assert (varied - plain).flatten(1).std(1).max() == 0  # one change an image
    assert 0.2 < moved_N.abs().max() <= (0.2 + plain.max()) * 1.2
    assert moved_N.min() < -0.15
    again = Transform(Augment(jitter=0.2), 0, (0.5,) * 3, (0.25,) * 3)(images_NHWC[:7], index_N[:7], 0)
    assert again.equal(varied[:7])
