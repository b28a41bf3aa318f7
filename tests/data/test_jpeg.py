"""The house's own decoder of JPEG crops against Pillow; without a C compiler there is none."""

import io
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kasoku.data.decode import native
from kasoku.data.decode.decode import crop, decode, fitted

pytestmark = pytest.mark.skipif(not native.LIBRARY, reason="kasoku was installed without a C compiler")


def picture(width, height, seed=0):
    """Smooth shapes with edges and some noise, as photos have."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), np.uint8)
    pixels = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    pixels[height // 3 : height // 2, width // 4 : width // 2] += 60
    return Image.fromarray(np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8))


def saved(image, **options):
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def by_pillow(data, box, size):
    with Image.open(io.BytesIO(data)) as opened:
        return fitted(np.asarray(opened.convert("RGB")), box, size)


def assert_near(got, want):
    away = np.abs(got.astype(int) - want.astype(int))
    assert away.mean() <= 1.0
    assert (away <= 8).mean() >= 0.999


def boxes(width, height):
    yield 0, 0, width, height
    yield width * 0.31, height * 0.17, width * 0.83, height * 0.9
    yield width * 0.6, height * 0.7, width, height
    yield 0.25, 0.5, min(9.75, width), min(7.25, height)
    yield width - 1, height - 1, width, height


@pytest.mark.parametrize("options", [
    {"quality": 90, "subsampling": 0},
    {"quality": 75, "subsampling": 1},
    {"quality": 50, "subsampling": 2},
    {"quality": 100, "subsampling": 2},
    {"quality": 90, "optimize": True},
    {"quality": 90, "restart_marker_rows": 1},
    {"quality": 90, "restart_marker_blocks": 3},
    {"quality": 10},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("shape", [(64, 48), (97, 131), (16, 200), (1, 1), (17, 9)], ids=str)
def test_crops_have_the_pixels_that_pillow_gives(options, mode, shape):
    data = saved(picture(*shape).convert(mode), **options)
    for box in boxes(*shape):
        for size in ((32, 32), (7, 50), (1, 1)):
            got = np.zeros((*size, 3), np.uint8)
            assert native.crop_jpeg(data, lambda w, h, box=box: box, got)
            assert_near(got, by_pillow(data, box, size))


@pytest.mark.data
def test_crops_of_real_photos_have_the_pixels_that_pillow_gives(real_data):
    rng = np.random.default_rng(0)
    own = 0
    for path in sorted((real_data / "imagenet_fullsize").rglob("*.JPEG")):
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as opened:
            turned = opened.getexif().get(274, 1) != 1
            width, height = opened.size
        x, y = np.sort(rng.random((2, 2)), 1) * [[width], [height]] + [[0], [0.0]]
        box = (x[0], y[0], max(x[1], x[0] + 0.5), max(y[1], y[0] + 0.5))
        box = (*box[:2], min(box[2], width), min(box[3], height))
        got = np.zeros((96, 112, 3), np.uint8)
        if native.crop_jpeg(data, lambda w, h, box=box: box, got):
            own += 1
            away = np.abs(got.astype(int) - by_pillow(data, box, (96, 112)).astype(int))
            assert away.max() <= 5  # a column of chroma too far to a side is ten and more
            assert away.mean() <= 0.5
        else:
            assert turned
    assert own >= 140


@pytest.fixture
def plain():
    """Calls f without AVX2, then with it."""

    def both(f):
        native.LIBRARY.kasoku_jpeg_plain(1)
        try:
            first = f()
        finally:
            native.LIBRARY.kasoku_jpeg_plain(0)
        return first, f()

    return both


@pytest.mark.parametrize("size", [(32, 32), (7, 50), (224, 224), (40, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}], ids=str)
def test_pixels_are_the_same_with_and_without_wide_vectors(options, size, plain):
    for mode, shape in (("RGB", (97, 131)), ("L", (64, 48)), ("RGB", (400, 300)), ("RGB", (9, 11))):
        data = saved(picture(*shape).convert(mode), quality=95, **options)
        for box in boxes(*shape):
            got = [np.zeros((*size, 3), np.uint8) for _ in range(2)]
            left = iter(got)
            assert plain(
                lambda box=box, left=left, data=data: native.crop_jpeg(data, lambda w, h: box, next(left))
            ) == (
                True,
                True,
            )
            assert (got[0] == got[1]).all()


@pytest.mark.parametrize("side", [1500, 512, 130])
@pytest.mark.parametrize("level", [0, 3, 16, 137, 255])
def test_a_flat_image_stays_as_it_is_however_much_it_is_reduced(side, level):
    data = saved(Image.new("RGB", (side, side), (level,) * 3), quality=100)
    for out in (4, 16, 64, 224):
        got = np.zeros((out, out, 3), np.uint8)
        assert native.crop_jpeg(data, lambda w, h: (0, 0, w, h), got)
        assert np.abs(got.astype(int) - level).max() <= 1, (out, got[0, 0])


def test_chroma_that_is_halved_from_top_to_bottom_alone():
    cv2 = pytest.importorskip("cv2", reason="opencv writes such files")
    pixels = np.asarray(picture(131, 97))
    options = [cv2.IMWRITE_JPEG_QUALITY, 90, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440]
    data = cv2.imencode(".jpg", pixels[:, :, ::-1], options)[1].tobytes()
    for box in boxes(131, 97):
        got = np.zeros((32, 40, 3), np.uint8)
        assert native.crop_jpeg(data, lambda w, h, box=box: box, got)
        assert_near(got, by_pillow(data, box, (32, 40)))


def test_a_header_that_takes_the_end_marker_in_is_damaged():
    body = saved(picture(20, 20).convert("L"))
    scan = body.index(b"\xff\xda")
    data = body[:scan] + b"\xff\xda\x00\x08\x01\x01\x00\x00\xff\xd9"
    assert not native.crop_jpeg(data, lambda w, h: (0, 0, w, h), np.zeros((16, 16, 3), np.uint8))
    assert native.jpeg_size(data) is None


def test_others_are_left_to_pillow():
    image = picture(40, 30)
    turned = Image.Exif()
    turned[274] = 6
    got = np.zeros((16, 16, 3), np.uint8)
    for data in (
        saved(image, progressive=True),
        saved(image.convert("CMYK")),
        saved(image, exif=turned),
        saved(image)[:-200],
        saved(image) + b"more",
        b"",
        b"\xff\xd8",
        os.urandom(300),
    ):
        assert not native.crop_jpeg(data, lambda w, h: (0, 0, w, h), got)


@pytest.mark.parametrize("box", [
    (0, 0, 0, 10), (5, 5, 4, 8), (-1, 0, 10, 10), (0, 0, 41, 10), (float("nan"), 0, 10, 10), (0, 0, float("inf"), 9),
])  # fmt: skip
def test_a_box_outside_the_image_is_refused(box):
    assert not native.crop_jpeg(saved(picture(40, 30)), lambda w, h: box, np.zeros((8, 8, 3), np.uint8))
    planes = np.zeros((3, 30, 40), np.uint8).transpose(1, 2, 0)
    assert not native.resize_planes(planes, box, np.zeros((8, 8, 3), np.uint8))


BODIES = [
    saved(picture(80, 61), quality=80),
    saved(picture(80, 61), quality=80, restart_marker_rows=1),
    saved(picture(33, 70).convert("L"), optimize=True),
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(BODIES),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.booleans(),
)
def test_damaged_files_never_do_harm(body, changes, corners, early):
    data = bytearray(body)
    for where, value in changes:
        data[int(where * min(len(data) - 1, 700 if early else len(data)))] = value
    out = np.full((24 + 2, 24, 3), 7, np.uint8)

    def box(width, height):
        left, right = sorted((corners[0] * width, corners[2] * width))
        top, bottom = sorted((corners[1] * height, corners[3] * height))
        return left, top, right, bottom

    native.crop_jpeg(bytes(data), box, out[1:-1])
    assert (out[[0, -1]] == 7).all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 90), st.integers(1, 90), st.tuples(*[st.floats(0, 1)] * 4), st.integers(1, 40), st.integers(1, 40)
)
def test_planes_are_resized_as_pillow_does(width, height, corners, out_width, out_height):
    pixels = np.asarray(picture(width, height, seed=width))
    left, right = sorted((corners[0] * width, corners[2] * width))
    top, bottom = sorted((corners[1] * height, corners[3] * height))
    box = (left, top, max(right, min(left + 0.1, width)), max(bottom, min(top + 0.1, height)))
    if box[2] - box[0] < 0.05 or box[3] - box[1] < 0.05:
        return
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)
    got = np.zeros((out_height, out_width, 3), np.uint8)
    assert native.resize_planes(planes, box, got)
    want = fitted(pixels, box, (out_height, out_width))
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


def test_crop_without_the_piece_of_c_gives_the_same_pixels(monkeypatch):
    for data in (saved(picture(300, 200)), saved(picture(2000, 900), quality=80)):
        found = []
        for there in (True, False):
            if not there:
                monkeypatch.setattr(native, "LIBRARY", None)
            out = np.zeros((64, 64, 3), np.uint8)
            crop(data, lambda w, h: (0.1 * w, 0.2 * h, 0.8 * w, 0.9 * h), out)
            found.append(out)
        monkeypatch.undo()
        assert_near(*found)


def with_xmp(number):
    body = saved(picture(40, 20))
    text = (
        b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/>'
    )
    text %= number
    return body[:2] + b"\xff\xe1" + (len(text) + 2).to_bytes(2, "big") + text + body[2:]


@pytest.mark.parametrize("number", [1, 6])
def test_an_orientation_told_in_xmp_is_obeyed(number):
    out = np.zeros((8, 8, 3), np.uint8)
    seen = []
    crop(with_xmp(number), lambda w, h: seen.append((w, h)) or (0, 0, w, h), out)
    assert seen[-1] == decode(with_xmp(number)).shape[1::-1] == ((40, 20) if number == 1 else (20, 40))
    assert native.crop_jpeg(with_xmp(number), lambda w, h: (0, 0, w, h), out) is (number == 1)
