"""kasoku simulate: its figures, its page, and one clear line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kasoku.cli import main

RECIPES = Path(__file__).parent.parent / "recipes"
RECORD = RECIPES / "imagenet_resnet50_81920.toml"
GRADED = ["--set", "techniques=[{use='kasoku.parallel.Overlap', buckets={use='kasoku.parallel.Graded'}}]"]


def simulated(folder: Path, *options: str) -> dict[str, object]:
    assert main(["simulate", str(RECORD), *GRADED, "--out", str(folder), *options]) == 0
    found: dict[str, object] = json.loads((folder / "simulation.json").read_text())
    return found


def test_a_step_on_2048_gpus_is_itemised_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(tmp_path / "s", "--cluster", "abci", "--gpus", "2048", "--allreduce", "hierarchical")
    items = [found[f"{item}_s"] for item in ("compute", "jitter", "exposed", "input")]
    assert sum(items) == pytest.approx(found["step_s"], rel=1e-9)  # type: ignore[arg-type]
    assert found["images_per_s"] == pytest.approx(81920 / found["step_s"], rel=1e-9)  # type: ignore[operator]
    rows = found["rows"]
    assert isinstance(rows, dict)
    steps = 16 * 90 * found["step_s"]  # type: ignore[operator]
    assert sum(rows[k] for k in ("input", "forward", "backward", "exposed")) == pytest.approx(steps, rel=1e-9)
    assert rows["evaluate"] == pytest.approx(23 * 0.06)
    page = (tmp_path / "s" / "report.html").read_text()
    assert "2,048 V100, simulated" in page
    assert '"transfer"' in page
    assert "layer4.2.conv3" in page
    shown = " ".join(capsys.readouterr().out.split())
    assert "2,048 V100, 40 images each" in shown
    assert "exposed communication" in shown


def test_a_better_network_exposes_less_and_a_sweep_draws_what_each_way_hides(tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text('name = "slow"\nnodes = 64\ngpu = "a100"\n[node]\ngpus = 8\nport_gb_s = 240.0\nnic_gb_s = 1.0\n')
    changes = "network*4,latency/2"
    options = ["--cluster", str(slow), "--gpus", "512", "--batch", "25600", "--set", "norm_batch=50"]
    found = simulated(tmp_path / "s", *options, "--what-if", changes, "--sweep", "gpus=1:512")
    other = found["what_if"][changes]  # type: ignore[index]
    assert other["exposed_s"] < found["exposed_s"]
    assert other["compute_s"] == found["compute_s"]
    sweep = found["sweep"]
    assert isinstance(sweep, dict)
    assert sweep["images_a_gpu"] == 50
    one, graded, recipe, better = sweep["points"].values()
    assert len(one) >= 40
    assert [n for n, *_ in one] == [n for n, *_ in better]
    assert all(n <= 8 or n % 8 == 0 for n, *_ in one)
    assert one[-1][1] > graded[-1][1] > better[-1][1]  # seconds a step at 512
    assert recipe[-1][1] <= graded[-1][1]
    drawn = (tmp_path / "s" / "sweep.svg").read_text()
    assert "one group after backward" in drawn
    assert changes in drawn


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster", "abci", "--gpus", "5000"], "abci has 1,088 nodes of 4: 1 to 4,352 can be had"),
        (["--cluster", "abci", "--gpus", "10"], "take 1 to 4, or a multiple of 4"),
        (["--cluster", "abci", "--gpus", "2048", "--batch", "1000", "--set", "norm_batch=0"], "batch=1000"),
        (["--cluster", "nowhere"], "one of abci, dgx-a100, dgx-h100, dgx1-v100, mn2, or a file"),
        (["--cluster", "abci", "--what-if", "speed*2"], "network, latency, nvlink or gpu"),
        (["--cluster", "abci", "--sweep", "gpus=1:9999"], "abci has 4,352 GPUs"),
        (["--cluster", "abci", "--sweep", "nodes=1:9"], "gpus=A:B is wanted"),
        (["--cluster", "abci", "--allreduce", "butterfly"], "one of auto, ring, tree"),
        (["--cluster", "no.toml"], "no.toml: cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_one_clear_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(RECORD), *GRADED, "--out", str(tmp_path / "s"), *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kasoku: ")
    assert said in error
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "c"\nnodes = 0\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "nodes=0: at least 1"),
        ('name = "c"\nnodes = 2\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "2 nodes need a network"),
        ('name = "c"\nnodes = 1\ngpu = "v1000"\n[node]\ngpus = 4\nport_gb_s = 1.0\n', "gpu v1000: one of a100"),
        ('name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpus = 4\nport_gb_s = 1.0\nnics = 3\n', "multiple of the other"),
        ('name = "c"\nnodes = 1\ngpu = "v100"\n[node]\ngpu = 4\nport_gb_s = 1.0\n', "node.gpu: no such key"),
    ],
)
def test_an_impossible_topology_is_one_clear_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(text)
    assert main(["simulate", str(RECORD), *GRADED, "--cluster", str(tmp_path / "c.toml")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error


def test_a_profile_gives_the_times_and_that_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["conv1", "bn1", *(f"layer{i + 1}.{k}" for i, n in enumerate((3, 4, 6, 3)) for k in range(n)), "fc"]
    for folder, scale in (("b32", 32), ("b64", 64)):
        blocks = [{"name": n, "forward_s": 1e-4 + 1e-5 * scale, "backward_s": 2e-4 + 2e-5 * scale} for n in names]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "profile.json").write_text(json.dumps({"blocks": blocks}))
    given = [option for n in (32, 64) for option in ("--profile", f"{tmp_path / f'b{n}'}:{n}")]
    found = simulated(tmp_path / "s", "--cluster", "dgx-a100", "--gpus", "8", "--batch", "320", *given)
    each = 3 * (1e-4 + 1e-5 * 40) * len(names)  # forward and backward of a block at 40 images
    assert found["compute_s"] == pytest.approx(each, rel=1e-9)
    (tmp_path / "b32" / "profile.json").write_text('{"blocks": [{"name": "a", "forward_s": 1, "backward_s": 1}]}')
    options = ["--cluster", "dgx-a100", "--gpus", "8", *given]
    assert main(["simulate", str(RECORD), *GRADED, *options]) == 2
    assert "a profile of another model: resnet50 has conv1" in capsys.readouterr().err
