"""Train, evaluate and predict from Python: the functions that `import kasoku` gives. The commands do the same."""

from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path

from kasoku.config import trust
from kasoku.config.recipe import Recipe, load
from kasoku.config.shipped import locate
from kasoku.core import Comm, InputError, Wall, say
from kasoku.core.comm import default_comm
from kasoku.core.files import expanded
from kasoku.data import Shares, find_images
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.training import trained_run
from kasoku.training.elastic import fit_in
from kasoku.training.evaluation import Scores
from kasoku.training.run_folder import check_same_training, finished, shares_in, upload
from kasoku.training.run_state import Result
from kasoku.training.trainer import build, fit

Where = str | PathLike[str]


def load_recipe(recipe: Where, settings: Sequence[str] = ()) -> Recipe:
    """Reads a recipe. Not collective.

    Args:
        recipe: a file (TOML), or the name of a recipe that comes with kasoku, such as "digits_cnn_98". It may name
            modules in its own folder and in the current one, so a stranger's recipe can run a stranger's code.
        settings: changes, as after --set: ["epochs=30", "optimizer.lr=0.1"].

    Raises:
        InputError: in one line, with the path of what is wrong.
    """
    file = locate(Path(recipe))
    trust.allow_beside(file)
    return load(file, settings)


def train(
    recipe: Recipe, out: Where | None = None, *, comm: Comm | None = None, resume: bool = False, quiet: bool = False
) -> Result:
    """Trains to the last epoch, the target, or SIGINT or SIGTERM (`Result.stopped`). Collective; drains.

    Args:
        recipe: what to train.
        out: the run folder, a new one. None: nothing is written or sent, and only the result stays.
        comm: the ranks, `kasoku.distributed.TorchComm()` in a process group; one rank by default.
        resume: go on with the run in `out` from its last checkpoint, to the same bits. A finished run is left as it is.
        quiet: no progress bar.

    Returns: accuracies from 0 to 1, images a second, and seconds from this call on, by what they were spent on.

    Raises:
        InputError: for parts that do not fit each other; a folder that holds a run already (without `resume`); a recipe
            that is not the run's in more than a resumed run may change (kasoku.config.recipe.CHANGEABLE).
        DivergedError: when the loss is not finite any more (kasoku.training.run_state).
    """
    started, comm = Wall().now(), comm or default_comm()
    shares: tuple[int, ...] = ()
    folder = expanded(out or "")
    if out and resume:
        run_on_all_ranks(comm, lambda: check_same_training(folder, recipe))
        if run_on_all_ranks(comm, lambda: finished(folder, recipe)):
            upload(comm, folder, recipe.save.upload)
            return Result.read(folder)
        shares = shares_in(folder, comm, recipe.batch)
    training = run_on_all_ranks(comm, lambda: build(recipe, comm, shares=Shares(shares)))
    if not out:
        if training.job.trackers or recipe.save.upload:
            say("Track and save.upload send nothing without a run folder: give out, a folder", comm.rank)
        return fit(training, None, started=started, quiet=quiet)
    describe = partial(training.describe, import_folders=None if resume else trust.import_folders(None))
    result = fit_in(folder, training, describe, started=started, resume=resume, quiet=quiet)
    upload(comm, folder, "" if result.stopped else recipe.save.upload)
    return result


def evaluate(run: Where | Sequence[Where], data: Where | None = None, *, allow: Sequence[str] = ()) -> Scores:
    """Top-1, top-5 (from 0 to 1) and loss of a run's best weights on its test images. Not collective.

    Args:
        run: a run folder; several, or the folder of an ensemble: of their mean probabilities.
        data: other test images: a folder with one folder a class, a list (.csv, .jsonl), a .parquet file or
            a pattern of these. Without a test part, all images are tested; of a folder
            with train/ alone, the tenth that a training holds out.
        allow: modules or packages of yours that the run's recipe may name.

    Raises:
        InputError: if there is no run or no weights, if a file of it was changed, and for other classes.
    """
    runs = [run] if isinstance(run, str | PathLike) else run
    with trust.only(allow):
        return trained_run.score_runs([expanded(each) for each in runs], Path(data) if data else None)[-1][1]


def predict(
    run: Where, images: Where | Sequence[Where], *, top: int = 5, allow: Sequence[str] = ()
) -> dict[Path, list[tuple[str, float]]]:
    """The likeliest classes of images, with their probabilities (from 0 to 1, computed in fp32). Not collective.

    Args:
        run: a run folder, whose best weights are used; or that of an ensemble: the mean of its members' probabilities.
        images: files, or folders of them. They are cropped and resized as in the evaluation.
        top: how many classes an image.
        allow: modules or packages of yours that the run's recipe may name.

    Returns: by image file, the likeliest first: {Path("cat.jpg"): [("cat", 0.93), ("dog", 0.05), ...]}.

    Raises:
        InputError: if there is no run, and for a file that is missing, damaged, or no image.
    """
    with trust.only(allow):
        members = trained_run.load_members([expanded(run)], precision="fp32")
    given = [images] if isinstance(images, str | PathLike) else images
    files = [file for image in given for file in find_images(Path(image))]
    found = {}
    for file, likeliest, error in trained_run.classify(members, files, top):
        if error:
            raise InputError(error)
        found[file] = likeliest
    return found
