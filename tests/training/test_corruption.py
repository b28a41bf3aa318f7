"""A bit that flips in `kasoku train` ends all ranks with one line and exit code 5; the run resumes from before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.started import KASOKU, RECIPE, ended, kill, largest_difference, options, started

FLIPS = '''
from dataclasses import dataclass
from pathlib import Path

import torch

from kasoku.core import Technique


@dataclass(frozen=True)
class Flip(Technique):
    """Flips a bit of a weight of one rank between two steps, once."""

    once: str
    rank: int = 1
    step: int = 7

    def apply(self, job):
        def flip():
            mark = Path(self.once)
            if job.comm.rank == self.rank and job.steps == self.step and not mark.exists():
                mark.touch()
                p = next(job.model.parameters())
                p.data.view(-1).view(torch.int32)[0] ^= 1 << 22

        job.after_step(flip)
'''
SAVING = ("save.every_steps=2", "save.keep=99", "epochs=3")


def command(folder: Path, every: int, flips: str = FLIPS, **flip: object) -> list[str]:
    """`kasoku train` of a recipe with Replay and Flip, up to the run folder."""
    recipe = shutil.copy(RECIPE, folder)
    (folder / "flips.py").write_text(flips)
    settings = "".join(f", {name}={value!r}" for name, value in {"once": str(folder / "flipped"), **flip}.items())
    techniques = f"techniques=[{{use='kasoku.distributed.Replay', every={every}}}, {{use='flips.Flip'{settings}}}]"
    return ["train", str(recipe), *options(*SAVING, techniques), "--quiet", "--continue", "--out"]


def trained(arguments: list[str], code: int) -> list[str]:
    """What each of two ranks wrote to stderr."""
    ranks = started(arguments, 2)
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        kill(ranks)
    assert [rank.returncode for rank in ranks] == [code] * 2, said
    return said


@pytest.mark.process
def test_a_flipped_bit_ends_all_ranks_and_the_training_resumes_from_before_it(tmp_path: Path) -> None:
    arguments, run, whole = command(tmp_path, 5), tmp_path / "run", tmp_path / "whole"
    said = trained([*arguments, str(run)], 5)
    lines = [line for line in said[0].splitlines() if line.startswith("kasoku: ")]
    assert len(lines) == 1, said
    assert "silent corruption at step 10, ranks 0 (host " in lines[0]
    assert "resume from a checkpoint of step 5 or before" in lines[0]
    assert "kasoku: " not in said[1]
    folders = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert [name for name in folders if name.startswith("step-")] == ["step-000000002", "step-000000004"]
    suspect = [name.rpartition("-")[0] for name in folders if name.startswith("suspect-")]
    assert suspect == [f"suspect-step-{step:09d}" for step in (6, 8, 10)]
    said = trained([*arguments, str(run)], 0)
    assert "going on from step 4" in said[0]
    trained([*arguments, str(whole)], 0)
    assert largest_difference(whole, run) == 0


@pytest.mark.process
def test_a_rank_alone_names_a_bit_that_flips_within_a_checked_step(tmp_path: Path) -> None:
    within = FLIPS.replace("job.after_step(flip)", "job.model.register_forward_hook(lambda *_: flip())")
    said = ended([*KASOKU, *command(tmp_path, 7, within, rank=0), str(tmp_path / "run")], code=5)
    assert "silent corruption at step 7, rank 0 (host " in said
