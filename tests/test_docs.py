"""The manual: its commands run, its links lead somewhere, its generated pages are up to date."""

import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from helpers.pages import LANGUAGES, ROOT, Block, Reader, anchors, blocks, dead_links
from helpers.photos import coloured_photos

MANUAL = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*MANUAL, *(p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if p.exists())]
LINKED = [*PAGES, *(p for p in (ROOT / name for name in ("DESIGN.md", "SECURITY.md", "CHANGELOG.md")) if p.exists())]
CLASSES = {"n02102040": "dog", "n03028079": "church", "n01440764": "fish"}  # of ImageNet, in KASOKU_DATA
WEIGHTS = "resnet18-f37072fd.pth"  # the name of torchvision's file


def _nav(entries: list) -> list[str]:
    """The files of mkdocs.yml's nav."""
    values = [value for entry in entries for value in (entry.values() if isinstance(entry, dict) else [entry])]
    return [name for value in values for name in (_nav(value) if isinstance(value, list) else [value])]


def _runs(block: Block) -> bool:
    """Whether a test must run a block, or say why not."""
    return block.language in ("console", "python") and not block.title


def test_no_page_holds_the_marks_of_a_merge():
    assert [page.name for page in LINKED if "\n<<<<<<< " in page.read_text() or "\n>>>>>>> " in page.read_text()] == []


def test_links_within_the_project_lead_somewhere():
    dead = [line for page in LINKED for line in dead_links(page)]
    assert not dead, "\n".join(dead)


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, here\n[a](#a-title-here) [b](page.md#gone) [c](gone.md) `[d](gone)`\n```\n[e](gone)\n```\n"
    )
    assert [line.split(": ", 1)[1] for line in dead_links(page)] == [
        "page.md#gone: no such heading",
        "gone.md: no such file",
    ]


def test_every_page_is_in_the_navigation_once():
    listed = _nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == [page.name for page in MANUAL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_block_says_what_it_is(page):
    wrong = [f"{b.place}: {b.language or 'no language'}" for b in blocks(page) if b.language not in LANGUAGES]
    assert not wrong, "\n".join(["a fenced block has one of the languages " + ", ".join(LANGUAGES), *wrong])
    later = "\n".join(b.text for b in blocks(page) if b.language in ("console", "python"))
    unused = [f"{b.place}: {b.title}" for b in blocks(page) if b.title and Path(b.title).stem not in later]
    if page.stem == "CONTRIBUTING":  # tests/test_contributing.py runs its files
        unused = []
    assert not unused, "\n".join(["no command of the page uses these files, so no test runs them", *unused])


def _script(name: str) -> types.ModuleType:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_shows_no_comments_and_no_links_out_of_docs():
    page = "<!-- test: skip it -->\n[rules](../SECURITY.md) and [photos](photos.md) <!-- record: a/b -->"
    shown = _script("mkdocs_hooks").on_page_markdown
    assert shown(page, config=types.SimpleNamespace(repo_url=None)) == "rules and [photos](photos.md)"
    linked = shown(page, config=types.SimpleNamespace(repo_url="https://forge/kasoku/"))
    assert linked == "[rules](https://forge/kasoku/blob/main/SECURITY.md) and [photos](photos.md)"


def test_generated_parts_are_up_to_date():
    pages = _script("reference").pages()
    old = [name for name, text in pages.items() if text != (ROOT / "docs" / name).read_text()]
    assert not old, f"{', '.join(old)}: run python docs/reference.py"


@pytest.fixture(scope="session")
def belongings(tmp_path_factory) -> Path:
    """What a reader has at first: photos, and published weights."""
    folder = tmp_path_factory.mktemp("belongings")
    real = Path(os.environ.get("KASOKU_DATA", "")) / "imagenette224" / "train"
    if real.is_dir():
        for number, (wnid, name) in enumerate(CLASSES.items()):
            (folder / "photos" / name).mkdir(parents=True)
            for i, file in enumerate(sorted((real / wnid).iterdir())[:16]):
                with Image.open(file) as photo:
                    photo.convert("RGB").resize((96, 72)).save(folder / "photos" / name / f"{16 * number + i}.jpg")
    else:
        coloured_photos(folder / "photos")
        for k, name in enumerate(CLASSES.values()):
            (folder / "photos" / f"colour{k}").rename(folder / "photos" / name)
    from kasoku.models import resnet18

    weights = resnet18().state_dict()
    torch.save(weights, folder / WEIGHTS)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "resnet18.safetensors")
    return folder


@pytest.fixture
def reader(belongings, tmp_path, monkeypatch) -> Reader:
    """A reader in a folder and on a core of their own."""
    folder = tmp_path / "reader"
    shutil.copytree(belongings / "photos", folder / "photos")
    for file in belongings.iterdir():
        if file.is_file():
            (folder / file.name).hardlink_to(file)
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    threads, cores, path, modules = (
        torch.get_num_threads(),
        sorted(os.sched_getaffinity(0)),
        [*sys.path],
        {*sys.modules},
    )
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})
    torch.set_num_threads(1)
    yield Reader(folder)
    os.sched_setaffinity(0, set(cores))
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in {*sys.modules} - modules:  # the reader's own
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


RUN = [page for page in PAGES if any(map(_runs, blocks(page)))]


@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.smoke] * (page.stem == "index")) for page in RUN],
)
def test_the_commands_of_a_page_run(page, reader, record_property):
    ran, skipped = 0, []
    for block in blocks(page):
        if reason := block.notes.get("skip"):
            skipped.append(f"{block.place}: {reason}")
        else:
            ran += reader.read(block) * (len(block.commands) if block.language == "console" else 1)
    record_property("ran", ran)
    record_property("skipped", skipped)
    print(f"\n{page.name}: {ran} ran", *skipped, sep="\n  skipped ")


def test_anchors_are_those_of_forges_and_of_the_site(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Ranks, and `kasoku train`\n## 2 - cores\n```\n# no heading\n```\n## What.next\n")
    assert anchors(page) == {"ranks-and-kasoku-train", "whatnext"}  # they disagree about 2 - cores
