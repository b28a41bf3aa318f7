"""The options of every command: a frozen dataclass each, whose fields say how they are written.

Nothing here imports torch, so help is there at once.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform, get_args, get_type_hints

from kasoku.config.shipped import DOCUMENTS, locate

if TYPE_CHECKING:
    from kasoku.config.recipe import Recipe

_RECIPE = "a recipe file (TOML), or the name of a recipe that comes with kasoku (kasoku list)"
PORT = 29500
TIME_LIMIT, CPUS_PER_GPU = "1-00:00:00", 8  # of a Slurm job
STRATEGIES = ("TimeToTarget", "Throughput", "EpochTimeMinimize", "GpuUsageMaximize")
FORMATS = {"safetensors": "export.safetensors", "torch-export": "export.pt2", "onnx": "export.onnx", "hub": "hub"}
PLACES = {
    "local": "start this machine's ranks, a process a GPU (or on the CPU)",
    "slurm": "write an sbatch script",
    "kubernetes": "write a manifest: Indexed Job, headless Service, recipe",
    "kubeflow": "write a manifest for Kubeflow Trainer: TrainJob, its runtime, recipe",
    "skypilot": "write a SkyPilot task",
}


def argument(**settings: Any) -> Any:
    """A field that is a positional argument; `settings` are those of argparse's `add_argument`."""
    default: Any = None if settings.get("nargs") == "?" else MISSING
    return field(default=default, metadata={"flag": "", "settings": settings})


def option(flag: str = "", *, default: Any = None, **settings: Any) -> Any:
    """A field that is an option, called `flag` or as the field; `settings` are those of argparse's `add_argument`.

    Its default says how it is written: False is a switch, and () an option that may be given several times.
    """
    if settings.get("required"):
        default = MISSING
    elif default is False:
        settings["action"] = "store_true"
    elif default == ():
        settings |= {"action": "append", "default": []}
    else:
        settings["default"] = default
    return field(default=default, metadata={"flag": flag or "--", "settings": settings})


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class CommandArguments:
    """The arguments of a command: its options are fields. `if_interrupted`: what an interruption leaves behind."""

    traceback: bool = option(default=False, help="also show where an error came from")
    words: tuple[str, ...] = ()  # of the command line, after `kasoku`
    started: float = 0.0  # when the command was typed, on the clock of time.perf_counter
    if_interrupted: ClassVar[str] = "nothing was written"
    description: ClassVar[str | None] = None  # at the head of its help

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class JsonArguments(CommandArguments):
    """The arguments of a command that can answer programs; it fills `document`, which --json prints."""

    json: bool = option(default=False, help="print one JSON object and nothing else")
    document: dict[str, Any] = field(default_factory=dict)


class AllowArguments(CommandArguments):
    """The arguments of a command that builds what a recipe or a run names."""

    allow: tuple[str, ...] = option(default=(), metavar="NAME", help="your module or package that the recipe may use")


class OptionalRecipe(AllowArguments):
    """The arguments of a command that can do without a recipe."""

    recipe: Path | None = argument(nargs="?", type=locate, help=_RECIPE)
    set: tuple[str, ...] = option(default=(), metavar="PATH=VALUE", help="change a setting of the recipe")


class RecipeArguments(OptionalRecipe):
    """The arguments of a command that reads a recipe."""

    recipe: Path = argument(type=locate, help=_RECIPE)

    def load(self, *settings: str) -> "Recipe":
        """The recipe with the settings of the command line, and these over them; its own modules can be imported."""
        from kasoku.config.recipe import load  # torch: `kasoku --help` does without
        from kasoku.config.trust import allow_beside

        allow_beside(self.recipe)
        return load(self.recipe, [*self.set, *settings])


@contextmanager
def only_json(document: Mapping[str, Any]) -> Iterator[None]:
    """Prints the document of a command, also of one that fails with a part of it, and nothing else."""
    from kasoku.core.files import json_text  # torch: `kasoku --help` does without

    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        if document:  # of several ranks, the first one has it
            print(json_text(document), end="")


def declare(parser: argparse.ArgumentParser, kind: type[CommandArguments]) -> None:
    """Has a parser read the fields of a dataclass; their annotations say of which type they are."""
    types = get_type_hints(kind)
    parser.description = kind.description
    for each in fields(kind):
        if not each.metadata:
            continue
        flag, settings = each.metadata["flag"], dict(each.metadata["settings"])
        if known := [t for t in (get_args(types[each.name]) or (types[each.name],)) if t in (int, float, Path)]:
            settings.setdefault("type", known[0])
        if flag == "--":
            flag += each.name.replace("_", "-")
        parser.add_argument(*([flag] if flag else []), dest=each.name, **settings)
    parser.set_defaults(kind=kind)


def arguments_of(parsed: argparse.Namespace, words: Sequence[str], started: float) -> CommandArguments:
    """The dataclass of what a parser read."""
    kind: type[CommandArguments] = parsed.kind
    read = {each.name: getattr(parsed, each.name) for each in fields(kind) if each.metadata}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
    return kind(**given, words=tuple(words), started=started)


class TrainArguments(OptionalRecipe):
    """The arguments of `kasoku train`."""

    out: Path | None = option(metavar="DIR", help="the run folder (default: runs/NAME-N)")
    resume: Path | None = option(metavar="DIR", help="go on with the run in DIR")
    go_on: bool = option("--continue", default=False, help="go on with the run in --out, as it is, if any")
    data: Path | None = option(metavar="DIR", help="photos without a recipe: folder, .csv, .jsonl, .parquet or pattern")
    weights: Path | None = option(metavar="FILE", help="with --data: published weights to start from")
    freeze: int = option(default=0, metavar="K", help="with --weights: do not train the first K blocks")
    members: int = option(default=0, metavar="K", help="train K members of an ensemble")
    vary: tuple[str, ...] = option(default=(), metavar="PATH=V1,V2,...", help="with --members: a value for each")
    dry_run: bool = option(default=False, help="only print what the recipe would do")
    show: bool = option("--print", default=False, help="only print the resolved recipe (TOML)")
    quiet: bool = option(default=False, help="no progress bar")
    if_interrupted: ClassVar[str] = "a checkpoint written before stands"


class LaunchArguments(RecipeArguments):
    """The arguments that `kasoku launch` has everywhere."""

    nodes: int = option(default=1, metavar="N", help="the number of machines (default: 1)")
    gpus_per_node: int | None = option(metavar="G", help="ranks a machine (default: all its GPUs; in a cluster job 8)")
    out: Path | None = option(metavar="DIR", help="the run folder, which all nodes see")
    members: int = option(default=0, metavar="K", help="train K members of an ensemble")
    vary: tuple[str, ...] = option(default=(), metavar="PATH=V1,V2,...", help="with --members: a value for each")
    if_interrupted: ClassVar[str] = "a checkpoint written before stands"


class LocalArguments(LaunchArguments):
    """The arguments of `kasoku launch local`."""

    node: int | None = option(metavar="I", help="which of the nodes this is (default: 0)")
    master: str | None = option(metavar="HOST", help="the host of node 0 (default: MASTER_ADDR, or this one)")
    port: int | None = option(
        metavar="P", help="free on node 0 (default: MASTER_PORT; else any, or 29500 for several nodes)"
    )
    go_on: bool = option("--continue", default=False, help="go on with the run in --out, as it is, if any")
    quiet: bool = option(default=False, help="no progress bar")


class SlurmArguments(LaunchArguments):
    """The arguments of `kasoku launch slurm`."""

    name: str | None = option(help="the name of the job (default: the recipe's)")
    port: int | None = option(metavar="P", help="the port of rank 0 (default: from the job's number)")
    cpus_per_gpu: int = option(default=CPUS_PER_GPU, metavar="C", help="(default: %(default)s)")
    time: str = option(default=TIME_LIMIT, metavar="D-HH:MM:SS", help="limit (default: %(default)s)")


class KubernetesArguments(LaunchArguments):
    """The arguments of `kasoku launch kubernetes`."""

    name: str | None = option(help="the name of the job (default: the recipe's)")
    image: str = option(
        default="kasoku:latest", help="a container image, built from kasoku's Containerfile (default: %(default)s)"
    )
    mount: tuple[str, ...] = option(default=(), metavar="CLAIM:DIR", help="a volume claim for the run, the data, ...")
    port: int = option(default=PORT, metavar="P", help="the port of rank 0 (default: %(default)s)")


KubeflowArguments = KubernetesArguments


class SkypilotArguments(KubernetesArguments):
    """The arguments of `kasoku launch skypilot`; a claim is the name of a volume of SkyPilot."""

    accelerator: str = option(default="H100", metavar="NAME", help="the GPU, as sky gpus list has it (default: H100)")


class TuneArguments(RecipeArguments, JsonArguments):
    """The arguments of `kasoku tune`."""

    strategy: str | None = option(
        metavar="NAME", help=f"{', '.join(STRATEGIES)}, or one of your own (default: the recipe's, else the first)"
    )
    budget: float | None = option(metavar="SECONDS", help="how long it may take (default: the recipe's tune.budget)")
    range: str | None = option(metavar="LOW:HIGH", help="the batch sizes to try")
    out: Path | None = option(metavar="DIR", help="write tuning.json there, which kasoku report draws")
    if_interrupted: ClassVar[str] = "nothing was changed"

    def load(self, *settings: str) -> "Recipe":
        """The recipe; --strategy and --budget are keys of its table [tune], and --set changes a strategy's own."""
        use = f"kasoku.tune.{self.strategy}" if self.strategy in STRATEGIES else self.strategy
        strategy = [f'tune.strategy={{use = "{use}"}}'] if use else []
        budget = [] if self.budget is None else [f"tune.budget={self.budget}"]
        return RecipeArguments.load(replace(self, set=(*strategy, *self.set)), *budget, *settings)


class SearchArguments(RecipeArguments):
    """The arguments of `kasoku search`."""

    space: Path = option(required=True, metavar="FILE", help="TOML: path = {low, high, log, step} or {choices}")
    trials: int = option(required=True, metavar="N", help="the number of trials, with those of earlier parts")
    jobs: int = option(default=1, metavar="K", help="trainings at once (default: 1)")
    pruner: Literal["halving", "median", "none"] = option(
        choices=("halving", "median", "none"),
        default="halving",
        help="continue the best quarter after 1, 4, 16 evaluations, or those above the median (default: halving)",
    )
    out: Path | None = option(metavar="DIR", help="the folder of the search; if it holds one, that goes on")
    if_interrupted: ClassVar[str] = "finished trials stay, and the same command with --out goes on there"


class ProfileArguments(RecipeArguments, JsonArguments):
    """The arguments of `kasoku profile`."""

    steps: int = option(default=10, metavar="N", help="steps of each measurement (default: 10)")
    ranks: int | None = option(metavar="N", help="processes on this machine (default: as kasoku train)")
    out: Path | None = option(metavar="DIR", help="the folder for the results (default: runs/NAME-profile-N)")
    if_interrupted: ClassVar[str] = "no run was changed"
    description: ClassVar[str] = "kasoku profile [--out DIR] -- python train.py ...: the same for your script"


class ScriptArguments(CommandArguments):
    """The arguments of `kasoku profile -- COMMAND`."""

    out: Path | None = option(metavar="DIR", help="the folder for the results (default: runs/NAME-profile-N)")


class SimulateArguments(RecipeArguments, JsonArguments):
    """The arguments of `kasoku simulate`."""

    cluster: str = option(required=True, metavar="NAME|FILE", help="abci, mn2, dgx-a100, ..., or a file")
    gpus: int | None = option(metavar="N", help="how many (default: all of a node)")
    profile: tuple[str, ...] = option(default=(), metavar="DIR", help="times of kasoku profile at a batch")
    sweep: str = option(default="", metavar="AXIS=A:B", help="draw curves: gpus, strong, images, batch, bucket_mib")
    what_if: tuple[str, ...] = option(default=(), metavar="PATH=VALUE", help="change the cluster: latency=0.5")
    out: Path | None = option(metavar="DIR", help="the folder for it all (default: runs/NAME-simulated-N)")


class PlanArguments(RecipeArguments, JsonArguments):
    """The arguments of `kasoku plan`."""

    cluster: str = option(required=True, metavar="NAME|FILE", help="abci, mn2, dgx-a100, ..., or a file")
    deadline: str = option(default="", metavar="TIME", help="find the cheapest within a time: 90s, 10min, 2h")
    budget: str = option(default="", metavar="USD", help="find the fastest within an amount: 100USD")
    fastest: bool = option(default=False, help="the fastest, whatever it costs")
    buckets: bool = option(default=False, help="also print groups for plain DDP: its bucket_cap_mb_list")
    profile: tuple[str, ...] = option(default=(), metavar="DIR", help="times of kasoku profile at a batch")
    out: Path | None = option(metavar="DIR", help="the folder for it all (default: runs/NAME-plan-N)")


class ReproduceArguments(CommandArguments):
    """The arguments of `kasoku reproduce`."""

    document: str = argument(metavar="DOCUMENT", help=", ".join(DOCUMENTS))
    part: tuple[str, ...] = option(default=(), metavar="NAME", help="only this experiment")
    list: bool = option(default=False, help="only list the experiments")
    long: bool = option(default=False, help="hours, not minutes: the sizes of the recorded results")
    full: bool = option(default=False, help="the published sizes, where there are some; needs the published hardware")
    record: bool = option(default=False, help="with --long: keep the results in records/documents")
    out: Path | None = option(metavar="DIR", help="the folder; results in it are kept (default: a new one)")
    if_interrupted: ClassVar[str] = "what finished stays, and the same command with --out goes on there"


class ReportArguments(CommandArguments):
    """The arguments of `kasoku report`."""

    runs: tuple[Path, ...] = argument(nargs="+", metavar="RUN")
    out: Path | None = option(metavar="FILE", help="(default: report.html; of one run or ensemble, in its folder)")
    compare: bool = option(default=False, help="refuse runs that are not of two groups")
    description: ClassVar[str] = (
        "Runs of two recipes are compared over their seeds: A1 A2 A3 -- B1 B2 B3, or all in any order, by recipe."
    )


class EvaluateArguments(AllowArguments, JsonArguments):
    """The arguments of `kasoku eval`."""

    runs: tuple[Path, ...] = argument(nargs="+", metavar="RUN")
    data: Path | None = option(metavar="DIR", help="other test images, as train --data takes them")


class PredictArguments(AllowArguments, JsonArguments):
    """The arguments of `kasoku predict`."""

    trained: Path = argument(metavar="RUN")
    images: tuple[Path, ...] = argument(nargs="+", metavar="IMAGE|DIR")
    out: Path | None = option(metavar="FILE", help="where to (default: standard output)")
    numbers: Path | None = option(metavar="FILE", help="write an ILSVRC submission; lines of FILE are CLASS NUMBER")
    description: ClassVar[str] = (
        "RUN is a run folder, or that of an ensemble: the mean of its members' probabilities. Columns: image, class_1, "
        "probability_1, ..., class_5, probability_5, error (why the image cannot be read). With --numbers instead, as "
        "the ILSVRC wants submissions: an image a line, the numbers of its five likeliest classes; 0 for an image that "
        "cannot be read."
    )
    if_interrupted: ClassVar[str] = "the rows that were written stand"


class ExportArguments(AllowArguments):
    """The arguments of `kasoku export`."""

    trained: Path = argument(metavar="RUN")
    format: str = option(choices=tuple(FORMATS), required=True)
    out: Path | None = option(metavar="FILE", help="where to; of hub a folder (default: in the run folder)")


class DataArguments(CommandArguments):
    """The arguments of `kasoku data`."""

    name: str = argument(metavar="NAME", help="cifar10, cifar100, mnist, fashion-mnist or imagenette")
    to: str = option(required=True, metavar="DIR", help="the folder for the data")
    source: str = option(default="", metavar="URL", help="another address of the same files")
    quiet: bool = option(default=False, help="no progress bar")
    if_interrupted: ClassVar[str] = "what was downloaded so far stays, and the same command goes on there"


class PackArguments(CommandArguments):
    """The arguments of `kasoku pack`."""

    source: str | None = argument(nargs="?", metavar="SRC", help="a folder, list, Parquet or tar files; or an address")
    target: str | None = argument(nargs="?", metavar="DST", help="the folder for the pack")
    side: int = option(default=256, help="shorter side in pixels; 0: as it is (default: 256)")
    format: Literal["jpeg", "raw"] = option(choices=("jpeg", "raw"), default="jpeg", help="raw: pixels (default: jpeg)")
    quality: int = option(default=90, help="the quality of JPEG (default: 90)")
    workers: int = option(default=0, help="threads (default: one a core)")
    verify: str | None = option(metavar="DIR", help="check that a pack is whole, by its checksums")
    quiet: bool = option(default=False, help="no progress bar")
    if_interrupted: ClassVar[str] = "the shards that are whole stay, and the same command goes on there"


class InitArguments(CommandArguments):
    """The arguments of `kasoku init`."""

    source: Path = argument(metavar="DIR|NAME", help="photos, as train --data takes them, or a recipe of kasoku list")
    out: Path | None = option(metavar="FILE", help="the recipe to write (default: NAME.toml in the current folder)")


class ListArguments(AllowArguments, JsonArguments):
    """The arguments of `kasoku list`."""

    name: str | None = argument(nargs="?", help="shows the settings of this model, technique, table, ...")
