from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kasoku.core import InputError
from kasoku.data import decode, read_image


def save(tmp_path, image, name="x.png", **options):
    image.save(tmp_path / name, **options)
    return str(tmp_path / name)


def ramp(mode, width=20, height=10):
    return Image.linear_gradient("L").resize((width, height)).convert(mode)


@pytest.mark.parametrize(("mode", "name"), [("L", "x.png"), ("P", "x.png"), ("RGB", "x.bmp"), ("1", "x.png")])
def test_any_mode_becomes_rgb(tmp_path, mode, name):
    image = ramp("L").convert(mode)
    got = decode(save(tmp_path, image, name))
    assert got.shape == (10, 20, 3)
    assert (got == np.asarray(image.convert("RGB"))).all()


def test_sixteen_bit_grey_keeps_its_range(tmp_path):
    values = np.linspace(0, 65535, 200).astype(np.uint16).reshape(10, 20)
    got = decode(save(tmp_path, Image.fromarray(values)))
    assert (got == (values >> 8)[..., None]).all()


def test_white_shows_through_where_a_pixel_is_transparent(tmp_path):
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = (10, 20, 30, 255)
    got = decode(save(tmp_path, Image.fromarray(clear)))
    assert got[0, 0].tolist() == [10, 20, 30]
    assert (got.reshape(-1, 3)[1:] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shorter", [0, 16])
def test_exif_orientation_puts_the_image_upright(tmp_path, orientation, shorter):
    upright = np.zeros((64, 96, 3), np.uint8)
    upright[:32, :48] = 255  # light at the top left
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the turn that the orientation tag undoes
    stored = Image.fromarray(upright)
    if orientation > 1:
        stored = stored.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    got = decode(save(tmp_path, stored, "x.jpg", exif=exif, quality=95), shorter)
    height, width = got.shape[:2]
    assert (height, width) == ((16, 24) if shorter else (64, 96))
    corners = got[[2, 2, -3, -3], [2, -3, 2, -3]].mean(1)
    assert corners[0] > 200
    assert max(corners[1:]) < 50


@pytest.mark.parametrize(("size", "want"), [((640, 480), (128, 171)), ((128, 500), (500, 128)), ((50, 40), (40, 50))])
def test_only_larger_images_are_shrunk_and_keep_their_shape(tmp_path, size, want):
    assert decode(save(tmp_path, ramp("RGB", *size), "x.jpg"), 128).shape[:2] == want


@pytest.mark.parametrize(
    "body", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xff\xd8\xff\xe0\0\x10JFIF", b"\x89PNG\r\n\x1a\n\0\0\0"]
)
def test_what_is_no_image_is_one_clear_line_with_the_file(tmp_path, body):
    path = tmp_path / "bad.jpg"
    path.write_bytes(body)
    with pytest.raises(InputError, match=r"bad\.jpg: cannot be decoded as an image \(.+\); mend or remove") as caught:
        decode(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        decode(str(tmp_path / "gone.jpg"))


def test_a_truncated_image_is_refused(tmp_path):
    path = save(tmp_path, ramp("RGB", 300, 300), "x.jpg")
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(InputError, match=r"x\.jpg: cannot be decoded.*truncated"):
        decode(path)


@pytest.mark.data
def test_real_odd_files_are_decoded_or_refused_by_name(real_data):
    bad = {"not_an_image", "truncated_200bytes", "truncated_60pct", "zero_bytes"}
    for path in sorted((real_data / "odd" / "derived").glob("*.*")):
        if path.suffix == ".txt":
            continue
        if path.stem in bad:
            with pytest.raises(InputError, match=path.name):
                decode(str(path), 64)
        else:
            got = decode(str(path), 64)
            assert got.dtype == np.uint8
            assert got.shape[2] == 3
            assert got.std() > 5 or path.stem == "one_pixel"


def test_read_image_is_the_middle_at_the_wanted_size(tmp_path):
    image = np.zeros((90, 200, 3), np.uint8)
    image[:, 60:140] = 255
    path = save(tmp_path, Image.fromarray(image))
    got = read_image(path, (32, 32), 1)
    assert got.shape == (32, 32, 1)
    assert got.float().mean() > 250
    assert read_image(path, (90, 200), 3).numpy().tolist() == image.tolist()  # its own size: as it is
    assert read_image(path, (28, 14)).shape == (28, 14, 3)
