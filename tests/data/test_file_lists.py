"""Lists of image files, CSV or JSON Lines, are read as a folder of classes is."""

import csv
import itertools
import json
from pathlib import Path

import pytest

from helpers.photos import coloured_photos
from helpers.web import serving, web
from kasoku.cli import main
from kasoku.core import InputError
from kasoku.data import folder, loader
from kasoku.data.packs.writer import pack


@pytest.fixture
def photos(tmp_path):
    return coloured_photos(tmp_path / "set" / "photos", images=8, side=40)


def rows_of(photos):
    return [(f"photos/{file.parent.name}/{file.name}", file.parent.name) for file in sorted(photos.rglob("*.jpg"))]


def write(path, rows, names=("path", "label", "split")):
    rows = [dict(zip(names, row, strict=False)) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as out:
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def facts(dataset):
    return [sorted((s.read(i), int(s.labels_N[i])) for i in range(len(s))) for s in (dataset.train, dataset.test)]


def everything(dataset):
    return sorted(itertools.chain(*facts(dataset)))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_list_is_the_images_and_classes_of_its_folder(photos, suffix, monkeypatch):
    root = write(photos.parent / f"all, of 'em.{suffix}", rows_of(photos))
    d, wanted = folder(root, 32), folder(str(photos), 32)
    assert (d.name, d.classes) == ("set", wanted.classes)
    assert everything(d) == everything(wanted)
    assert [len(d.train), len(d.test)] == [len(wanted.train), len(wanted.test)]
    assert d.train.name(0).startswith("colour0/")
    monkeypatch.chdir(photos.parent)
    assert folder(Path(root).name).index() == d.index()
    absolute = [(str(photos.parent / path), label) for path, label in rows_of(photos)]
    assert everything(folder(write(photos.parent / f"a.{suffix}", absolute))) == everything(d)


def test_the_column_split_tells_the_parts(photos):
    rows = [(path, label, ("train", "valid", "test")[i % 3]) for i, (path, label) in enumerate(rows_of(photos))]
    d = folder(write(photos.parent / "l.csv", rows))
    assert [len(d.train), len(d.test)] == [8, 8]
    assert {d.test.name(i) for i in range(8)} == {"/".join(p.split("/")[-2:]) for p, _, s in rows if s == "valid"}
    unnamed = [(path, label, "" if split == "train" else split) for path, label, split in rows]
    assert folder(write(photos.parent / "u.csv", unnamed)).index() == d.index()
    d = folder(write(photos.parent / "l.jsonl", [row for row in rows if row[2] != "valid"]))
    assert {d.test.name(i) for i in range(8)} == {"/".join(p.split("/")[-2:]) for p, _, s in rows if s == "test"}


def test_a_missing_file_is_skipped_and_named(photos):
    root = write(photos.parent / "l.csv", [*rows_of(photos), ("photos/none.jpg", "colour0")])
    d = folder(root, 32, seed=1)
    parts = [loader(d, "train", 2), loader(d, "test", 2)]
    assert sum(len(y_N) for part in parts for _, y_N in part) in (24, 25)
    (reason,) = [reason for part in parts for reason in part.skipped.reasons.values()]
    assert "none.jpg: cannot be read (No such file" in reason


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "", r"no class has two images"),
        ("l.csv", "path,label\n", r"no class has two images"),
        ("l.csv", "file,label\na.jpg,x\n", r"not a list of path, label \('path'\)"),
        ("l.csv", "path,label\na.jpg\n", r"a row without a path or a label"),
        ("l.csv", 'path,label\n"a.jpg,x\n', r"not a list of path, label \(unexpected end of data"),
        ("l.jsonl", '{"path": "a.jpg"}\n', r"'label'"),
        ("l.jsonl", '["a.jpg", 0]\n', r"not a list of path, label \("),
        ("l.jsonl", '{"path": "a.jpg", "label": null}\n', r"a row without a path or a label"),
        ("l.csv", "path,label,split\na.jpg,x,dev\n", r"\(split dev: train, val or test is wanted\); mend it"),
        ("l.jsonl", '{"path": "a.jpg", "label": 0, "split": 0}\n', r"split 0: train, val or test is wanted"),
        ("l.jsonl", "{", r"not a list of path, label \(Expecting"),
        ("l.csv", "path,label,split\na.jpg,x,val\n", r"val/x: a class that .*train does not have"),
        ("l.csv", "path,label,split\na.jpg,x,train\nb.jpg,y,val\n", r"val/y: a class that .*train does not have"),
        ("l.csv", "path,label\na.jpg,x\nb.jpg,y\n", r"no class has two images"),
    ],
)
def test_what_is_no_list_is_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        folder(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    (tmp_path / "l.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(InputError, match=r"not a list of path, label \('utf-8' codec"):
        folder(str(tmp_path / "l.csv"))


def test_a_list_is_trained_on_and_packed(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write(photos.parent / "l.jsonl", rows_of(photos))
    settings = ["--set", "epochs=1", "--set", "data.size=32", "--set", "device.threads=1", "--quiet"]
    assert main(["train", "--data", root, *settings, "--out", "run"]) == 0
    assert f'root = "{root}"' in Path("run/recipe.toml").read_text()
    assert main(["eval", "run"]) == 0
    assert pack(root, "packed", side=0).startswith("packed: 24 images of 3 classes")


@web
def test_a_list_on_a_server_is_read_as_here(photos):
    root = write(photos.parent / "l.csv", rows_of(photos))
    with serving() as site:
        site.files = {f"x/{f.relative_to(photos.parent)}": f.read_bytes() for f in photos.parent.rglob("*.*")}
        assert facts(folder(f"{site.root}/x/l.csv", cache_bytes=0)) == facts(folder(root))
