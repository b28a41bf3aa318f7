"""What is in a folder is seen anew at each start, here and far away."""

import shutil

import pytest

from helpers.made import fill
from kasoku.core import InputError
from kasoku.data import folder
from kasoku.data.datasets.folder import arranged
from kasoku.data.remote.store import Store


def listed(top):
    return arranged(Store(str(top)).look, str(top))


def test_a_link_is_followed_anew_at_each_start(tree, tmp_path):
    fill(tmp_path / "disk", 3)
    (tree / "train" / "dog").symlink_to(tmp_path / "disk")
    (tree / "train" / "eel").symlink_to(tmp_path / "later")
    assert sorted(listed(tree)["train"]) == ["ant", "bee", "cat", "dog"]
    (tmp_path / "disk").rename(tmp_path / "later")
    assert sorted(listed(tree)["train"]) == ["ant", "bee", "cat", "eel"]


def test_a_class_that_becomes_a_part_is_read_as_one(tmp_path):
    top = tmp_path / "photos"
    for name in ("cat", "val"):
        fill(top / name, 3)
    fill(top / "val" / "cat", 2)
    assert sorted(listed(top)[""]) == ["cat", "val"]
    fill(top / "train" / "cat", 4)
    assert {part: sorted(tree) for part, tree in listed(top).items()} == {"train": ["cat"], "val": ["cat"]}


def test_links_to_folders_above_and_beside_list_each_file_once(tree):
    (tree / "train" / "up").symlink_to(tree)
    (tree / "train" / "ant" / "beside").symlink_to(tree / "val")
    files = Store(str(tree)).list_files()
    assert len(files) == len(set(files)) == 18


def test_a_folder_that_is_gone_is_named(tree):
    store = Store(str(tree))
    shutil.rmtree(tree / "val" / "bee")
    with pytest.raises(InputError, match="val/bee: cannot be read"):
        store.look("val/bee")


def test_a_far_tree_is_looked_at_as_one_on_a_disk_is(tree):
    memory = pytest.importorskip("fsspec", reason="fsspec is not installed: no data far away").filesystem("memory")
    fill(tree / "train" / "ant" / "deeper", 1)
    fill(tree / "train" / ".git", 1)
    (tree / "train" / "bee" / "notes.txt").write_text("")
    (tree / "train" / "bee" / ".0.png").write_bytes(b"")
    for path in tree.rglob("*"):
        if path.is_file():
            memory.pipe(f"/far/{path.relative_to(tree)}", path.read_bytes())
    try:
        assert arranged(Store("memory://far").look, "far") == listed(tree)
        assert folder("memory://far").index() == folder(str(tree)).index()
        memory.mkdir("/far/train/dog")
        with pytest.raises(InputError, match="far/train/dog: a class folder with no image"):
            folder("memory://far")
    finally:
        memory.rm("/far", recursive=True)
