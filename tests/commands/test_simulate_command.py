"""kasoku simulate: its figures, its page, and one clear line for what cannot be."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from helpers.inspected import remember_networks
from kasoku.cli import main
from kasoku.config.recipe import load as load_recipe
from kasoku.simulate import load
from kasoku.simulate.from_recipe import scenario, sizes

RECIPES = Path(__file__).parent.parent.parent / "recipes"
RECORD = RECIPES / "imagenet_resnet50_81920.toml"
APART = ["--set", "norm_batch=0", "--set", "norm_average=0.0"]  # a batch as ranks at their own pace can have it
GRADED = ["--set", "techniques=[{use='kasoku.distributed.Overlap', buckets={use='kasoku.distributed.Graded'}}]"]


@pytest.fixture(autouse=True)
def _one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_networks(monkeypatch)


def asynchronous(settings: str = "", *more: str) -> list[str]:
    """The options of a recipe whose ranks exchange at their own pace."""
    techniques = ", ".join([f"{{use='kasoku.distributed.Asynchronous'{settings and ', '}{settings}}}", *more])
    return [*APART, "--set", f"techniques=[{techniques}]"]


def simulated(folder: Path, *options: str) -> dict[str, object]:
    assert main(["simulate", str(RECORD), *GRADED, "--out", str(folder), *options]) == 0
    found: dict[str, object] = json.loads((folder / "simulation.json").read_text())
    return found


def test_a_step_on_2048_gpus_is_itemised_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(tmp_path / "s", "--cluster", "abci", "--gpus", "2048")
    v100 = load("abci").device
    assert found["compute_s"] == pytest.approx(1e-3 * (v100.alpha_ms + 40 * v100.beta_ms), rel=1e-9)
    rows = found["rows"]
    assert isinstance(rows, dict)
    steps = 16 * 90 * found["step_s"]  # type: ignore[operator]
    assert sum(rows[k] for k in ("forward", "backward", "exposed")) == pytest.approx(steps, rel=1e-9)
    assert rows["evaluate"] == pytest.approx(23 * 0.06)
    few = simulated(tmp_path / "few", "--cluster", "abci", "--gpus", "4", "--set", "batch=2560")["rows"]
    assert isinstance(few, dict)
    forward_s = 1e-3 * (v100.alpha_ms + 12_500 * v100.beta_ms) / 3  # a quarter of ImageNet's 50,000 test images
    assert few["evaluate"] == pytest.approx(23 * forward_s, rel=1e-3)
    twice = [
        "--set",
        "evaluate.views=mirror",
        "--set",
        "techniques=[{use='kasoku.distributed.Recalibrate', images=4000}]",
    ]
    options = ["--cluster", "abci", "--gpus", "4", "--set", "batch=2560", *twice]
    more = simulated(tmp_path / "more", *options)["rows"]
    assert isinstance(more, dict)
    forward_s = 1e-3 * (v100.alpha_ms + 26_000 * v100.beta_ms) / 3  # those images twice, and 1,000 for BatchNorm
    assert more["evaluate"] == pytest.approx(23 * forward_s, rel=1e-3)
    page = (tmp_path / "s" / "report.html").read_text()
    assert "2,048 V100, simulated" in page
    assert '"transfer"' in page
    assert "layer4.2.conv3" in page
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "2,048 V100, 40 images each" in shown
    assert "price: AWS, p3.16xlarge on demand" in shown
    assert "exposed communication" in shown


def test_a_better_network_exposes_less_and_a_sweep_draws_each_way(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text('name = "slow"\nnodes = 64\ngpu = "a100"\n[node]\ngpus = 8\nport_gb_s = 240.0\nnic_gb_s = 1.0\n')
    changes = ["node.nic_gb_s=4", "latency=0.5"]
    options = ["--cluster", str(slow), "--gpus", "512", "--set", "batch=25600", "--set", "norm_batch=50"]
    given = [option for change in changes for option in ("--what-if", change)]
    found = simulated(tmp_path / "s", *options, "--sweep", "gpus=1:512")
    other = simulated(tmp_path / "t", *options, *given, "--sweep", "gpus=1:512")
    assert other["exposed_s"] < found["exposed_s"]  # type: ignore[operator]
    assert other["compute_s"] == found["compute_s"]
    sweep = found["sweep"]
    assert isinstance(sweep, dict)
    assert sweep["images_a_gpu"] == 50
    one, layers, ddp, graded, recipe = sweep["points"].values()
    assert len(layers) == len(ddp) == len(one)
    *_, better = other["sweep"]["points"].values()  # type: ignore[index]
    assert len(one) >= 40
    assert [n for n, *_ in one] == [n for n, *_ in better]
    assert all(n <= 8 or n % 8 == 0 for n, *_ in one)
    assert one[-1][1] > graded[-1][1] > better[-1][1]  # seconds a step at 512
    assert recipe[-1][1] <= graded[-1][1]
    rates, times = (sweep[key]["one group after backward"] for key in ("points", "speedups"))
    assert times == [[n, pytest.approx(images_per_s / rates[0][2])] for n, _, images_per_s, _ in rates]
    assert times[0] == [1, 1]
    drawn = (tmp_path / "s" / "sweep.html").read_text()
    assert '"name":"one group after backward"' in drawn
    assert f"slow, {', '.join(changes)}, 50 images a GPU" in (tmp_path / "t" / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("axis", "ends", "images"),
    [
        ("images", (16, 64), lambda x: 64 * x),
        ("batch", (64, 6400), lambda x: x),
        ("bucket_mib", (1, 64), lambda _: 2560),
    ],
)
def test_a_sweep_varies_images_batches_and_groups(axis: str, ends: tuple[int, int], images, tmp_path: Path) -> None:
    options = ["--cluster", "abci", "--gpus", "64", "--set", "batch=2560", "--sweep", f"{axis}={ends[0]}:{ends[1]}"]
    sweep = simulated(tmp_path / "s", *options)["sweep"]
    assert isinstance(sweep, dict)
    assert sweep["axis"] == axis
    for points in sweep["points"].values():
        assert (points[0][0], points[-1][0]) == ends
        for x, step_s, rate, exposed_s in points:
            assert rate == pytest.approx(images(x) / step_s, rel=1e-9)
            assert 0 <= exposed_s < step_s
    one, graded = (sweep["points"][f"{name} backward"] for name in ("one group after", "graded groups behind"))
    assert all(b[2] > a[2] for a, b in zip(one, graded, strict=True))  # groups are faster at every size
    drawn = (tmp_path / "s" / "sweep.html").read_text()
    assert "exposed communication, s" in drawn


def test_gpus_that_share_one_batch_are_swept_as_the_benchmark_of_003(tmp_path: Path) -> None:
    options = ["--cluster", "tsubame25", "--what-if", "node.gpus=1", "--gpus", "16", "--set", "batch=256"]
    more = ["--set", "norm_batch=0", "--sweep", "strong=1:16"]
    sweep = simulated(tmp_path / "s", *options, *more)["sweep"]
    assert isinstance(sweep, dict)
    for line, points in sweep["points"].items():
        assert all(rate == pytest.approx(256 / step_s, rel=1e-9) for _, step_s, rate, _ in points)
        speeds = dict(sweep["speedups"][line])
        assert speeds[1] == 1 < speeds[16] < 16


def test_the_start_of_communicators_grows_with_the_ranks(tmp_path: Path) -> None:
    def start_s(name: str, gpus: int) -> float:
        options = ["--cluster", "dgx-a100", "--gpus", str(gpus), "--set", f"batch={40 * gpus}"]
        rows = simulated(tmp_path / name, *options)["rows"]
        assert isinstance(rows, dict)
        return float(rows["start"])

    assert start_s("few", 512) == pytest.approx(512 * 265 / 98_304)
    assert start_s("many", 4096) == pytest.approx(8 * start_s("few again", 512))
    assert start_s("alone", 1) == 0  # it joins nobody
    rows = simulated(tmp_path / "file", "--cluster", "abci", "--gpus", "2048")["rows"]
    assert isinstance(rows, dict)
    assert rows["start"] == load("abci").costs.setup_s  # what was measured there


def test_a_sweep_has_at_least_40_sizes_evenly_spaced_in_logarithms() -> None:
    cluster = load("abci")
    found = sizes(cluster, 1, 4096)
    assert len(found) >= 40
    assert (found[0], found[-1]) == (1, 4096)
    assert all(n <= 4 or n % 4 == 0 for n in found)
    ratios = [b / a for a, b in itertools.pairwise(found) if a >= 64]  # below, nodes of 4 leave few to choose from
    assert max(ratios) < 1.3 * min(ratios)
    assert len(ratios) > 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "abci", "--gpus", "5000"], "abci has 1,088 nodes of 4: 1 to 4,352 are available"),
        (
            ["--cluster", "abci", "--set", "batch='auto'", "--set", "reference_batch=81920"],
            'batch = "auto" is tuned',
        ),
        (["--cluster", "abci", "--set", "epochs=0.01", "--set", "schedule.warmup=0"], "not one update"),
        (
            ["--cluster", "abci", "--set", "techniques=[{use='kasoku.data.GrowBatch'}]", "--set", "batch=655360"],
            "batch=1310720 in epoch 30: at most 1281167 images",
        ),
        (["--cluster", "abci", "--gpus", "10"], "take 1 to 4, or a multiple of 4"),
        (["--cluster", "abci", "--gpus", "2048", "--set", "batch=1000", "--set", "norm_batch=0"], "batch=1000"),
        (["--cluster", "nowhere"], "one of abci, dgx-a100, dgx-h100, dgx1-v100, mn1, mn1b, mn2, tsubame25, or a file"),
        (["--cluster", "abci", "--what-if", "speed=2"], "speed: no such key"),
        (["--cluster", "abci", "--sweep", "gpus=1:9999"], "abci has 4,352 GPUs"),
        (
            ["--cluster", "abci", "--sweep", "nodes=1:9"],
            "AXIS=A:B is wanted, 1 <= A <= B <= 1,000,000, as gpus=1:4096; axes: gpus, strong",
        ),
        (["--cluster", "no.toml"], "no.toml: cannot be read"),
        (["--cluster", "abci", "--gpus", "0"], "1 to 4,352 are available"),
        (["--cluster", "abci", "--what-if", "latency=nan"], "latency=nan"),
        (["--cluster", "abci", "--sweep", "gpus=8:4"], "1 <= A <= B <= 1,000,000"),
        (["--cluster", "abci", "--profile", "nowhere"], "nowhere: no profile there"),
        (["--cluster", "abci", *asynchronous(), "--set", "norm_batch=81920"], "norm_batch at most these images"),
        (["--cluster", "abci", *asynchronous("", "{use='kasoku.distributed.Overlap'}")], "nodes are not simulated"),
        (
            ["--cluster", "abci", "--set", "techniques=[{use='kasoku.distributed.Overlap', shard=true}]"],
            "sharded updates are not simulated: set shard = false",
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(RECORD), *GRADED, "--out", str(tmp_path / "s"), *options]) == 2
    remarks = ("the data is not here", "extrapolated")
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not any(text in line for text in remarks)]
    assert error.startswith("kasoku: ")
    assert said in error
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "c"\nnodes = 0\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "nodes=0: at least 1"),
        ('name = "c"\nnodes = 2\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "2 nodes need a network"),
        ('name = "c"\nnodes = 1\ngpu = "v1000"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "gpu='v1000': one of a100"),
        ('name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\nnics = 3\n', "or a divisor of them"),
        (
            'name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\nnics = 8\n',
            "a GPU with the sum of their rates",
        ),
        ('name = "c"\nnodes = 2\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\nnic_gb_s = nan\n', "nic_gb_s="),
        ('name = "c"\nnodes = 2\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = inf\nnic_gb_s = 1.0\n', "port_gb_s="),
        ('name = "c"\nnodes = 900000000\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "at most 1,000,000"),
        (
            'name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpus = 1\nport_gb_s = 0.0\n[racks]\nnodes = 0\n',
            "racks: nodes=0: at least 1 and below",
        ),
        ('name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpu = 4\nport_gb_s = 1.0\n', "node.gpu: no such key"),
    ],
)
def test_an_impossible_topology_is_one_clear_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(text)
    assert main(["simulate", str(RECORD), *GRADED, "--cluster", str(tmp_path / "c.toml")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("kasoku: ")
    assert said in error


def profiled(folder: Path) -> tuple[list[dict[str, object]], list[str]]:
    """Profiles of a ResNet-50 at 32 and 64 images: the blocks of the larger one, and the options that give both."""
    stages = [f"layer{i + 1}.{k}" for i, n in enumerate((3, 4, 6, 3)) for k in range(n)]
    names = ["conv1", "bn1", "relu", "maxpool", *stages, "avgpool", "fc"]
    blocks: list[dict[str, object]] = []
    for n in (32, 64):
        blocks = [{"name": name, "forward_s": 1e-4 + 1e-5 * n, "backward_s": 2e-4 + 2e-5 * n} for name in names]
        (folder / f"b{n}").mkdir()
        (folder / f"b{n}" / "profile.json").write_text(json.dumps({"blocks": blocks}))
        (folder / f"b{n}" / "ledger.json").write_text(json.dumps({"facts": {"batch": n}}))
    return blocks, [option for n in (32, 64) for option in ("--profile", str(folder / f"b{n}"))]


def test_a_profile_gives_the_times_and_that_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks, given = profiled(tmp_path)
    found = simulated(tmp_path / "s", "--cluster", "dgx-a100", "--gpus", "8", "--set", "batch=320", *given)
    each = 3 * (1e-4 + 1e-5 * 40) * len(blocks)  # forward and backward of a block at 40 images
    assert found["compute_s"] == pytest.approx(each, rel=1e-9)
    for parts, n, update_s in ((4, 32, 0.002), (1, 64, 0.004)):
        ledger = {"step_s": {"update": update_s}, "facts": {"batch": n // parts, "parts": parts}}
        (tmp_path / f"b{n}" / "ledger.json").write_text(json.dumps(ledger))
    updated = simulated(tmp_path / "u", "--cluster", "dgx-a100", "--gpus", "8", "--set", "batch=320", *given)
    assert updated["compute_s"] == pytest.approx(each + 0.003, rel=1e-9)
    options = ["--cluster", "dgx-a100", "--gpus", "8", *given]
    facts = '"facts": {"batch": 32}'
    for damaged in ('"facts": null', "", f'{facts}, "step_s": {{"update": null}}', f'{facts}, "step_s": []'):
        (tmp_path / "b32" / "ledger.json").write_text(f"{{{damaged}}}")
        assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
        assert "b32: no profile there (" in capsys.readouterr().err
    (tmp_path / "b32" / "ledger.json").write_text(f"{{{facts}}}")
    deeper = [*blocks, {"name": "layer3.6", "forward_s": 0.0, "backward_s": 0.0}]
    (tmp_path / "b32" / "profile.json").write_text(json.dumps({"blocks": deeper}))
    assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
    assert "a profile of another model: it has layer3.6, resnet50 has not" in capsys.readouterr().err
    (tmp_path / "b32" / "profile.json").write_text('{"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1}]}')
    assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
    assert "a profile of another model: resnet50 has conv1" in capsys.readouterr().err
    (tmp_path / "b32" / "profile.json").write_text('{"blocks": [{"name": "a", "forward_s": NaN, "backward_s": 1}]}')
    assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
    assert "a takes (nan, 1.0) s" in capsys.readouterr().err


def test_a_profile_is_extrapolated_or_refused_beyond_its_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks, given = profiled(tmp_path)
    simulated(tmp_path / "s", "--cluster", "dgx-a100", "--gpus", "8", "--set", "batch=320", *given)
    assert "profile's times" not in capsys.readouterr().err
    options = ["--cluster", "dgx-a100", "--gpus", "8", "--set", "batch=1280", "--set", "norm_batch=160", *given]
    simulated(tmp_path / "t", *options)
    assert "160 images a A100: the profile's times are from 32 to 64" in capsys.readouterr().err
    whole = {"name": "layer1", "forward_s": 1e-3, "backward_s": 1e-3}
    blocks = [whole, *(b for b in blocks if not str(b["name"]).startswith("layer1"))]
    (tmp_path / "b64" / "profile.json").write_text(json.dumps({"blocks": blocks}))
    assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
    assert "at 64 images other blocks than at 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.stem=cifar"], "resnet50, 63.6 G, is estimated by its work"),
        (["data.size=192"], "resnet50, 3 G, is estimated by its work"),
        (["device.precision=fp32"], "precision = fp32: A100 was measured in bf16"),
        (["techniques=[{use='kasoku.memory.SavedMemory', factor=4}]"], "SavedMemory: its recomputation"),
        (["norm_batch=80"], "norm_batch=80 is more than a rank has at once: BatchNorms wait for all ranks"),
    ],
)
def test_what_these_times_are_not_of_is_told(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cluster", "dgx-a100", "--gpus", "8", "--set", "batch=320"]
    simulated(tmp_path / "plain", *options)
    assert said not in capsys.readouterr().err
    simulated(tmp_path / "s", *options, *[word for setting in settings for word in ("--set", setting)])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("precision", "reducer"), [("auto", "Mean"), ("bf16", "Wire"), ("fp16", "Wire"), ("fp16", "Hierarchical")]
)
def test_loss_scaling_does_not_wait_for_all_groups(precision: str, reducer: str) -> None:
    dtype = ", dtype='fp16'" if reducer == "Wire" else ""
    settings = "buckets={use='kasoku.distributed.Graded'}, "
    settings += f"reducer={{use='kasoku.distributed.{reducer}'{dtype}}}"
    overlap = f"techniques=[{{use='kasoku.distributed.Overlap', {settings}}}]"
    recipe = load_recipe(RECORD, [overlap, f"device.precision={precision}"])
    assert scenario(recipe, load("abci")).step(2048).inputs.late  # auto is fp16 on V100


@pytest.mark.parametrize(("buckets", "groups"), [("Planned", 1), ("OneBucket", 1), ("Fixed", 5)])
def test_of_a_graph_all_gradients_are_sent_after_backward(buckets: str, groups: int) -> None:
    overlap = f"techniques=[{{use='kasoku.distributed.Overlap', buckets={{use='kasoku.distributed.{buckets}'}}}}]"
    recipe = load_recipe(RECORD, [overlap, "norm_batch=0", "norm_average=0", "device.graphs=true"])
    step = scenario(recipe, load("abci")).step(2048)
    assert len(step.inputs.plan.buckets) == groups
    assert not step.inputs.late
    assert step.exposed_s == pytest.approx(step.link_s, rel=1e-9), "nothing is hidden"


def test_a_share_in_parts_is_held_against_one_in_as_many_parts(tmp_path: Path) -> None:
    options = ["--cluster", "dgx-a100", "--set", "batch=320", "--set", "norm_batch=40", "--sweep", "gpus=1:8"]
    found = simulated(tmp_path / "s", *options, "--gpus", "1")  # in 8 parts
    assert found["efficiency"] == pytest.approx(1.0, rel=1e-9)
    sweep = found["sweep"]
    assert isinstance(sweep, dict)
    assert sweep["parts"] == 8
    for points in sweep["points"].values():
        assert points[0][1] == pytest.approx(found["step_s"])
    assert "320 images a GPU in 8 parts" in (tmp_path / "s" / "sweep.html").read_text()


def test_a_sweep_leaves_out_what_does_not_fill_the_nodes_of_a_reducer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "{use='kasoku.distributed.Overlap', buckets={use='kasoku.distributed.Graded'}, reducer=REDUCER}"
    wide = own.replace("REDUCER", "{use='kasoku.distributed.Hierarchical', node=16}")
    options = ["--cluster", "dgx-a100", "--gpus", "32", "--set", "batch=1280", "--set", f"techniques=[{wide}]"]
    sweep = simulated(tmp_path / "s", *options, "--sweep", "gpus=1:64")["sweep"]
    assert isinstance(sweep, dict)
    for points in sweep["points"].values():
        assert [n for n, *_ in points] == [1, 16, 32, 48, 64]
    assert "the largest by hierarchical in rows of 16" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    options[3:6] = ["24", "--set", "batch=960"]
    assert main(["simulate", str(RECORD), *options]) == 2
    assert "24 GPUs in nodes of 16: the nodes must be equal in size" in capsys.readouterr().err


def test_few_images_for_batch_norm_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", "dgx-a100", "--gpus", "8", "--set", "norm_batch=0"]
    simulated(tmp_path / "one", *options, "--set", "batch=8")
    assert "BatchNorm over 1 image at once" in (line := capsys.readouterr().err)
    assert "take a larger norm_batch or batch, a smaller accumulate, or fewer GPUs\n" in line
    simulated(tmp_path / "few", *options, "--set", "batch=64")
    assert "BatchNorm over 8 images at once" in capsys.readouterr().err
    simulated(tmp_path / "enough", *options, "--set", "batch=128")
    assert "BatchNorm" not in capsys.readouterr().err


def test_ranks_at_their_own_pace_are_simulated_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pace = asynchronous("max_staleness=4, every=2, wire='bf16', hidden=false, warmup=1")
    found = simulated(tmp_path / "s", "--cluster", "abci", "--gpus", "64", *pace, "--sweep", "gpus=1:64")
    said = capsys.readouterr()
    shown = " ".join(said.out.replace("│", " ").split())
    assert "ms of exchanges" in shown
    assert "all-reduces" not in shown
    first, second = found["steps"]  # type: ignore[misc]
    assert first == {"batch": 81920, "pixels": 1.0, "updates": pytest.approx(16), "step_s": first["step_s"]}
    assert first["step_s"] != second["step_s"] == found["step_s"]
    assert found["exposed_s"] == pytest.approx(found["exchange_s"], rel=1e-9) != 0
    assert "all_reduce_s" not in found
    assert found["images_per_s"] == pytest.approx(81920 / found["step_s"], rel=1e-9)  # type: ignore[operator]
    page = (tmp_path / "s" / "report.html").read_text()
    assert "updates in this order (buckets: 4," in page
    sweep = found["sweep"]
    assert isinstance(sweep, dict)
    *_, (name, points) = sweep["points"].items()
    assert name == "asynchronous"
    assert points[-1][1] == pytest.approx(found["step_s"], rel=1e-9)
    free = simulated(tmp_path / "f", "--cluster", "abci", "--gpus", "64", *asynchronous("warmup=1"))
    assert "the slowest rank not waited for" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert free["jitter_s"] == 0 < found["jitter_s"]  # type: ignore[operator]


def test_ranks_of_which_none_may_be_ahead_are_simulated_as_overlap(tmp_path: Path) -> None:
    together = simulated(tmp_path / "o", "--cluster", "abci", "--gpus", "64", *APART)
    same = simulated(tmp_path / "a", "--cluster", "abci", "--gpus", "64", *asynchronous("max_staleness=0"))
    assert same == together


def test_a_rank_alone_exchanges_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(tmp_path / "s", "--cluster", "abci", "--gpus", "1", "--set", "batch=64", *asynchronous())
    assert found["exposed_s"] == found["exchange_s"] == 0
    assert "0.00 ms of 0.00 ms of all-reduces" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_without_the_packages_of_the_page_the_figures_are_written(tmp_path, capsys, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith((missing, "kasoku.report.html."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert simulated(tmp_path / "s", "--cluster", "abci", "--gpus", "4", "--set", "batch=2560")["rows"]
    shown = capsys.readouterr()
    assert f"kasoku: no page: the page needs {missing}: pip install" in shown.err
    assert shown.out.endswith(f"{tmp_path / 's'}: simulation.json\n")
