"""Transforms: what an image gets depends on where it is in the training alone, and the training's generator stays."""

import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from contracts import assert_same, go_on, train, weights
from contracts import one_thread as one_thread
from helpers.photos import coloured_photos
from helpers.virtual_comm import VirtualClock
from kasoku.cli import main
from kasoku.config.describe import settings_of
from kasoku.config.toml import parse, table
from kasoku.core import InputError, Job, Trace
from kasoku.data import Augment, Dataset, Memory, Transforms, digits, folder, loader
from kasoku.data.augment.transforms import Vary
from kasoku.optim import sgd
from kasoku.report import Ledger, StepFacts
from kasoku.report.bottleneck import find_bottlenecks
from kasoku.report.ledger import STEP, Steps


def drawn(x_CHW: Tensor) -> Tensor:
    """Adds random numbers of every kind that torchvision draws, on an image or on a batch."""
    noise = torch.randint(0, 8, x_CHW.shape) + 8 * torch.rand(x_CHW.shape) + 4 * torch.randn_like(x_CHW.float())
    noise += torch.empty(1).uniform_(-9, 9) + torch.empty(x_CHW.shape).normal_() + torch.randperm(7)[0]
    noise += torch.multinomial(torch.tensor([0.3, 0.7]), 1) + torch.bernoulli(torch.full((1,), 0.5))
    noise += 20 * torch.distributions.Beta(2.0, 3.0).sample() + torch._sample_dirichlet(torch.ones(2))[0]
    return (x_CHW + noise).clamp(0, 255).to(torch.uint8)


def images(n: int = 24, height: int = 10, width: int = 12, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, height, width, channels), dtype=torch.uint8, generator=generator)


def job_on(*techniques, n: int = 60, comm=None, parts: int = 1) -> Job:
    split = Memory(images(n), torch.arange(n) % 4)
    dataset = Dataset("made", tuple("abcd"), split, split, 3, (10, 12), (0.5,) * 3, (0.2,) * 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Job(model, sgd, loader=loader(dataset, "train", 12, seed=5, comm=comm, parts=parts)).apply(*techniques)


def test_what_an_image_gets_depends_on_seed_epoch_and_index_alone():
    images_NHWC, index_N = images(), torch.arange(100, 124)
    vary = Vary((drawn,), 7, True)
    whole = vary(images_NHWC, index_N, 3, 0)
    assert (whole.shape, whole.dtype) == (images_NHWC.shape, torch.uint8)
    for rows in torch.arange(24).flip(0).split(7):
        assert torch.equal(vary(images_NHWC[rows], index_N[rows], 3, 9), whole[rows])
    for other in (vary(images_NHWC, index_N, 4, 0), vary(images_NHWC, index_N + 1, 3, 0)):
        assert not torch.equal(other, whole)
    assert not torch.equal(Vary((drawn,), 8, True)(images_NHWC, index_N, 3, 0), whole)
    assert vary(images_NHWC[:0], index_N[:0], 0, 0).shape == (0, 10, 12, 3)


def test_what_a_batch_gets_depends_on_its_place_in_the_epoch():
    vary = Vary((drawn,), 7, False)
    whole = vary(images(), torch.arange(24), 3, 5)
    assert torch.equal(vary(images(), torch.arange(24), 3, 5), whole)
    for epoch, part in ((4, 5), (3, 6)):
        assert not torch.equal(vary(images(), torch.arange(24), epoch, part), whole)


@pytest.mark.parametrize("per", ["image", "batch"])
def test_the_trainings_own_generator_neither_moves_nor_matters(per: str):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(Vary((drawn,), 0, per == "image")(images(), torch.arange(24), 0, 0))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*found)


def test_threads_do_not_meet_in_one_generator():
    """Each thread waits within its transform for the other one, so their draws are mixed."""
    meet = threading.Barrier(2, timeout=60)

    def mixed(x_CHW: Tensor) -> Tensor:
        first = torch.rand(1)
        meet.wait()
        return (x_CHW + 100 * first + 100 * torch.rand(1)).to(torch.uint8)

    results: dict[int, Tensor] = {}
    state = torch.get_rng_state()
    alone = Vary((lambda x: (x + 100 * torch.rand(1) + 100 * torch.rand(1)).to(torch.uint8),), 0, True)
    vary, image_HWC = Vary((mixed,), 0, True), torch.zeros(4, 4, 3, dtype=torch.uint8)
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: vary.run(image_HWC, 0, i)}), daemon=True) for i in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], alone.run(image_HWC, 0, i)) for i in (1, 2))
    assert not torch.equal(results[1], results[2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return coloured_photos(tmp_path_factory.mktemp("transforms") / "photos", images=12, side=40)


def of_files(photos: Path, tmp_path: Path, *techniques, threads: int) -> Job:
    data = folder(str(photos), size=16, cache=str(tmp_path / "cache"))
    return Job(nn.Flatten(), sgd, loader=loader(data, "train", 8, seed=5, threads=threads)).apply(*techniques)


def test_images_of_files_are_transformed_in_the_threads_that_decode(photos, tmp_path):
    names = set()

    def noted(x_CHW: Tensor) -> Tensor:
        names.add(threading.current_thread().name)
        return drawn(x_CHW)

    plain = [x for x, _ in of_files(photos, tmp_path, threads=1).loader]
    one, three = (of_files(photos, tmp_path, Transforms((noted,)), threads=n) for n in (1, 3))
    found = [x for x, _ in one.loader]
    assert names == {"kasoku-decode"}
    assert all(torch.equal(x, y) for x, (y, _) in zip(found, three.loader, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    assert one.trace.beside["transforms"] > 0
    vary, batches = Vary((drawn,), 5, True), of_files(photos, tmp_path, threads=1).loader
    run = batches.executor.run
    batches.executor.run = lambda pipeline, epoch, *more: (
        (vary(x, i, epoch, 0), y, i) for x, y, i in run(pipeline, epoch, *more)
    )
    assert all(torch.equal(x, y) for x, (y, _) in zip(found, batches, strict=True))


def test_the_next_good_image_is_transformed_in_place_of_a_bad_one(photos, tmp_path):
    bad = coloured_photos(tmp_path / "photos", images=12, side=40)
    (bad / "colour0" / "3.jpg").write_bytes(b"no image")
    job = of_files(bad, tmp_path, Transforms((lambda x: torch.full_like(x, 255),)), threads=2)
    job.plain_loader.executor.skipped.fraction = 0.5
    white = [bool((x == x[:1, :, :1, :1]).all()) for x, _ in job.loader]  # each channel has one value
    assert all(white)
    assert job.plain_loader.skipped.reasons


@pytest.mark.parametrize("per", ["image", "batch"])
def test_it_comes_before_augment(per: str):
    varied, by_hand = (
        job_on(*techniques, Augment(flip="random")).loader for techniques in ([Transforms((drawn,), per)], [])
    )
    vary, run, parts = Vary((drawn,), 5, per == "image"), by_hand.executor.run, iter(range(99))

    def change(pipeline, epoch, *more):
        return ((vary(x, i, epoch, next(parts) % 5), y, i) for x, y, i in run(pipeline, epoch, *more))

    by_hand.executor.run = change
    for _ in range(2):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(varied, by_hand, strict=True))
    assert not torch.equal(next(iter(varied))[0], next(iter(job_on(Augment(flip="random")).loader))[0])


def test_images_for_tests_and_statistics_are_not_transformed(photos, tmp_path):
    for varied, plain in (
        (job_on(Transforms((drawn,))), job_on()),
        (of_files(photos, tmp_path, Transforms((drawn,)), threads=1), of_files(photos, tmp_path, threads=1)),
    ):
        survey, plain_survey = varied.loader.survey(), plain.loader.survey()
        assert torch.equal(torch.cat([x for x, _ in survey]), torch.cat([x for x, _ in plain_survey]))
        tests = [loader(plain.loader.dataset, "test", 60) for _ in range(2)]
        tests[0].configure(vary=varied.loader.pipeline.vary)
        assert torch.equal(*(next(iter(test))[0] for test in tests))


def test_no_transform_is_identity_bit_for_bit():
    plain, neutral = job_on(), job_on(Transforms())
    for job in (plain, neutral):
        torch.manual_seed(3)  # of the dropout
        train(job, 8)
    assert_same(weights(plain), weights(neutral))


@pytest.mark.parametrize("per", ["image", "batch"])
def test_stopped_and_resumed_is_never_stopped(per: str):
    """The dropout of the network draws from the generator that the transforms do not touch."""
    whole, first, second = (job_on(Transforms((drawn,), per)) for _ in range(3))
    torch.manual_seed(3)
    train(whole, 12)
    torch.manual_seed(3)
    train(first, 7)
    state = torch.get_rng_state()
    go_on(first, second)
    torch.set_rng_state(state)
    train(second, 5)
    assert_same(weights(whole), weights(second))


@dataclass
class Rank:
    rank: int
    size: int


def of_ranks(per: str) -> list[list[Tensor]]:
    """The batches of two ranks, one rank after the other for each batch."""
    source = job_on().loader
    ranks = [loader(source.dataset, "train", 12, seed=5, comm=Rank(rank, 2)) for rank in range(2)]
    for batches in ranks:
        Job(nn.Flatten(), sgd, loader=batches).apply(Transforms((drawn,), per))
    return [[x for x, _ in both] for both in zip(*ranks, strict=True)]


def test_ranks_see_what_one_rank_would():
    alone = torch.cat([x for x, _ in job_on(Transforms((drawn,))).loader])
    assert torch.equal(alone, torch.cat([x for both in of_ranks("image") for x in both]))


def test_a_part_of_a_batch_gets_what_a_rank_would():
    in_parts = [x for x, _ in job_on(Transforms((drawn,), "batch"), parts=2).loader]
    ranks = [x for both in of_ranks("batch") for x in both]
    assert all(torch.equal(a, b) for a, b in zip(in_parts, ranks, strict=True))


def test_shares_that_are_dealt_get_what_their_ranks_would():
    batches = job_on(Transforms((drawn,), "batch")).loader
    batches.configure(size=2)
    shares = iter([3, 0, 1])
    with batches.deal_from(lambda: next(shares, None)):
        found = [(batches.last_share, x) for x, _ in batches]
    ranks = [x for both in of_ranks("batch") for x in both]
    assert [share for share, _ in found] == [3, 0, 1]
    assert all(torch.equal(x, ranks[share]) for share, x in found)


def test_close_gives_the_loader_back():
    job = job_on(Transforms((drawn,)))
    assert job.loader.pipeline.vary is not None
    job.close()
    assert job.loader.pipeline.vary is None


def test_the_ledger_has_a_row_of_them_where_the_loop_runs_them():
    clock = VirtualClock()

    def slow(x_CHW: Tensor) -> Tensor:
        clock.advance(0.25)
        return x_CHW

    for techniques, wanted in (([Transforms((slow,))], 15.0), ([Transforms((slow,), "batch")], 1.25), ([], 0.0)):
        batches = job_on(*techniques).loader
        batches.trace = trace = Trace(clock)
        steps = trace.follower = Steps(clock, torch.device("cpu"))
        ledger = Ledger(trace, started=clock.now())
        for _ in batches:
            steps.end()
        rows = ledger.rows()
        assert rows["transforms"] == wanted
        assert list(rows)[1:-3] == [*STEP[:-1]]
        assert ledger.training_s() == wanted
        assert steps.step_s()["transforms"] == wanted / 5


def test_the_ledger_names_what_threads_took_beside_it(photos, tmp_path):
    job = of_files(photos, tmp_path, Transforms((drawn,)), threads=2)
    list(job.loader)
    ledger = Ledger(job.trace, started=job.clock.now(), beside={"data": 1.0})
    facts = StepFacts(device="cpu", batch=8, layers=3, layer_s=1e-5, parameters=100)
    beside = ledger.document(job.comm, facts)[0]["beside"]
    assert beside["data"] == 1.0
    assert beside["transforms"] == round(job.trace.beside["transforms"], 4) > 0


def test_the_verdict_names_them():
    facts = StepFacts(device="cpu", batch=64, layers=3, layer_s=1e-5, parameters=100)
    step = dict.fromkeys(STEP, 0.001) | {"transforms": 0.02}
    first = find_bottlenecks([step], facts)[0]
    assert first.cause == "input-bound"
    assert "20 ms of it in Transforms" in first.line
    assert first.remedy == "use Augment and Mix in place of Transforms"


@dataclass(frozen=True)
class Document:
    technique: Transforms


def test_recipe_round_trip():
    tables = [{"use": "torch.nn.Identity"}, {"use": "torch.nn.Threshold", "threshold": 0.0, "value": 1.0}]
    document = parse(Document, {"technique": {"transforms": tables, "per": "batch"}})
    assert table(document)["technique"]["transforms"] == tables
    assert parse(Document, tomllib.loads(tomli_w.dumps(table(document)))) == document
    job_on(document.technique)
    assert [s.type for s in settings_of(Transforms)] == ["[table with `use`, ...]", '"image" | "batch"']


def test_what_it_does_not_fit_is_refused():
    with pytest.raises(InputError, match='per="pixel": "image" or "batch"'):
        Transforms((drawn,), "pixel")
    for wrong in (nn.Identity, "torch.nn.Identity"):
        with pytest.raises(InputError, match=r"transforms: .*Identity.*: a table such as {use = .*}, or in Python a"):
            Transforms((wrong,))
    with pytest.raises(InputError, match=r"give the job a kasoku\.data\.loader\(\.\.\.\), this is a list"):
        Job(nn.Flatten(), sgd, loader=[]).apply(Transforms((drawn,)))
    with pytest.raises(InputError, match=r'"os\.system": not a name that a recipe may use'):
        parse(Document, {"technique": {"transforms": [{"use": "os.system"}]}})


def fails(x_CHW: Tensor) -> Tensor:
    raise TypeError("no such\nimage")


BAD = {
    "another size": (lambda x: x[..., 1:], r"gave torch.uint8 \(3, \d+, \d+\); uint8 images of the same shape, \(3, "),
    "another type": (lambda x: x.float(), r"gave torch.float32 \(3, \d+, \d+\); uint8 images .* crops and normalises"),
    "no tensor": (lambda x: (x, x), "gave tuple; uint8 images"),
    "an error": (fails, r"Transforms: fails: no such image$"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_transform_that_fails_is_one_line(name: str, photos, tmp_path):
    transform, line = BAD[name]
    for job in (job_on(Transforms((transform,))), of_files(photos, tmp_path, Transforms((transform,)), threads=2)):
        with pytest.raises(InputError, match=line):
            next(iter(job.loader))


def test_grey_digits_are_transformed():
    job = Job(nn.Flatten(), sgd, loader=loader(digits(), "train", 100)).apply(Transforms((drawn,)))
    assert not torch.equal(next(iter(job.loader))[0], next(iter(loader(digits(), "train", 100)))[0])


# ---- with torchvision

VISION = {
    "RandAugment": {"num_ops": 2, "magnitude": 9},
    "TrivialAugmentWide": {},
    "AugMix": {},
    "AutoAugment": {},
    "RandomErasing": {"p": 1.0, "value": "random"},
    "GaussianNoise": {},
    "GaussianBlur": {"kernel_size": 3},
    "ColorJitter": {"brightness": 0.5, "hue": 0.2},
    "ElasticTransform": {},
    "RandomPhotometricDistort": {"p": 1.0},
    "RandomAffine": {"degrees": 30, "shear": 10},
    "RandomPerspective": {"p": 1.0},
}


@pytest.mark.extras
@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("per", ["image", "batch"])
def test_torchvisions_transforms_draw_from_generators_of_their_own(name: str, per: str):
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="needs torchvision: pip install 'kasoku[torchvision]'")
    vary = Vary((getattr(v2, name)(**VISION[name]),), 0, per == "image")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append([vary(images(6, 32, 32), torch.arange(6), epoch, epoch) for epoch in range(6)])
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert any(not torch.equal(x, found[0][0]) for x in found[0])


@pytest.mark.extras
@pytest.mark.parametrize("per", ["image", "batch"])
def test_a_recipe_with_torchvisions_transforms_resumes_to_the_same_bits(per: str, photos, tmp_path):
    pytest.importorskip("torchvision", reason="needs torchvision: pip install 'kasoku[torchvision]'")
    document = {
        "epochs": 2.0,
        "batch": 8,
        "model": {"use": "kasoku.models.cnn4"},
        "data": {"use": "kasoku.data.folder", "root": str(photos), "size": 16},
        "optimizer": {"use": "kasoku.optim.sgd", "lr": 0.02},
        "device": {"threads": 1, "precision": "fp32"},
        "save": {"every_steps": 1, "keep": 20},
        "techniques": [
            {
                "use": "kasoku.data.Transforms",
                "per": per,
                "transforms": [
                    {"use": "torchvision.transforms.v2.RandAugment", "num_ops": 2},
                    {"use": "torchvision.transforms.v2.RandomErasing", "p": 0.5},
                ],
            }
        ],
    }
    recipe, whole, run = tmp_path / "recipe.toml", tmp_path / "whole", tmp_path / "run"
    recipe.write_text(tomli_w.dumps(document))
    assert main(["train", str(recipe), "--quiet", "--out", str(whole)]) == 0
    assert main(["train", str(recipe), "--quiet", "--set", "epochs=1.4", "--out", str(run)]) == 0
    resumed = ["train", "--resume", str(run), "--quiet", "--set", "epochs=2.0"]
    assert main(resumed) == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, run))
    assert_same(first, second)
    plain = {**document, "techniques": []}
    recipe.write_text(tomli_w.dumps(plain))
    assert main(["train", str(recipe), "--quiet", "--out", str(tmp_path / "plain")]) == 0
    third = load_file(tmp_path / "plain" / "model.safetensors")
    assert any(not torch.equal(first[name], third[name]) for name in first)
