"""`kasoku export`: a trained network for other programs: safetensors, torch.export, ONNX, or a folder for hubs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kasoku.commands.arguments import FORMATS, ExportArguments
from kasoku.config import libraries
from kasoku.core import InputError, summary
from kasoku.core.errors import without_password
from kasoku.core.files import json_text, read_json, write_atomically, write_text
from kasoku.data.augment.basic import stored_side
from kasoku.training.run_folder import output_folder
from kasoku.training.run_state import Result
from kasoku.training.trained_run import Trained, ensemble_logits, load_members

_USES = {  # by the name of a library on model hubs: how it reads the folder
    "timm": 'timm.create_model("local-dir:FOLDER", pretrained=True).eval()',
    "transformers": 'transformers.AutoModelForImageClassification.from_pretrained("FOLDER")',
    "kasoku": 'kasoku.predict("FOLDER", "photo.jpg")',
}


class _FromPixels(nn.Module):
    """Normalises pixels, then the network; or all networks of an ensemble."""

    def __init__(self, members: Sequence[Trained]) -> None:
        super().__init__()
        self.networks = nn.ModuleList([member.job.model for member in members])
        self.mean = nn.Buffer(torch.tensor(members[0].mean).view(1, -1, 1, 1))
        self.std = nn.Buffer(torch.tensor(members[0].std).view(1, -1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        x_NCHW = (pixels - self.mean) / self.std
        return ensemble_logits([network(x_NCHW) for network in self.networks])


def run(arguments: ExportArguments) -> int:
    """Writes a run's best weights, or its whole network, and prints the file and its input; returns the exit code."""
    members = load_members([arguments.trained])
    for member in members:
        member.job.close()  # the plain network: no autocast, plain layout
        member.job.model.cpu()
    facts = _facts(members, weights_only=arguments.format in ("safetensors", "hub"))
    path = arguments.out or arguments.trained / FORMATS[arguments.format]
    if arguments.format == "hub":
        _write_hub(members, path, facts)
    else:
        write_atomically(path, _writer(arguments, members, facts))
        write_text(path.with_name(f"{path.name}.json"), json_text(facts))
    print(f"{path}\ninput: {facts['input']}\nfrom a photo: {facts['resize']}")
    print(f"output: {facts['output']}; the file holds the names of the classes")
    return 0


def _writer(arguments: ExportArguments, members: Sequence[Trained], facts: Mapping[str, Any]) -> Callable[[Path], Any]:
    """What writes the file of a format, with the facts in it as text."""
    trained = members[0]
    texts = {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}
    if arguments.format == "safetensors":
        return partial(save_file, _weights(members), metadata=texts)
    program = _FromPixels(members).eval()
    example = (torch.rand(2, trained.channels, *trained.image_size),)
    shapes: Any = {"pixels": {0: torch.export.Dim("batch", min=1)}}
    if arguments.format == "torch-export":
        exported = torch.export.export(program, example, dynamic_shapes=shapes)
        return partial(torch.export.save, exported, extra_files={"kasoku.json": json.dumps(texts)})
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError('ONNX export needs more packages: pip install "onnx>=1.17" "onnxscript>=0.5"') from error
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["logits"]}
    written: Any = torch.onnx.export(program, example, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    written.model.metadata_props.update(texts)
    graph = written.model.graph
    graph.inputs[0].doc_string, graph.outputs[0].doc_string = texts["input"], texts["output"]
    return partial(torch.onnx.ONNXProgram.save, written)


def _weights(members: Sequence[Trained]) -> dict[str, Tensor]:
    networks = nn.ModuleDict({member.path.name: member.job.model for member in members})
    plain = networks if len(members) > 1 else members[0].job.model
    # copies: safetensors refuses tensors that share memory, as tied weights do
    return {name: w.clone(memory_format=torch.contiguous_format) for name, w in plain.state_dict().items()}


def _facts(members: Sequence[Trained], *, weights_only: bool) -> dict[str, Any]:
    """What another program must know to use the network; the same in all formats."""
    trained, count, (height, width) = members[0], len(members), members[0].image_size
    shape, side = f"{height} x {width}", stored_side(min(height, width))
    resize = f"the middle 7/8 of the photo in the shape of {shape}, bilinear, antialiased"
    if height == width:
        resize = f"shorter side to {side}, bilinear, antialiased; then the middle {shape}"
    resize += "; a JPEG is decoded at 1/2, 1/4 or 1/8 before that, where it stays larger"
    resize += "; upright as its EXIF says, white where it is transparent"
    colours = {1: "grey", 3: "RGB"}.get(trained.channels, "all channels")
    mean, std = json.dumps(trained.mean), json.dumps(trained.std)
    then = f"then normalised: (pixel - mean) / std, mean {mean}, std {std}" if weights_only else "not normalised"
    output = f"logits, float32, N x {len(trained.classes)}, before softmax"
    if count > 1:
        output += f"; of the ensemble the logarithms of its {count} members' mean probabilities"
    return {
        "input": f"pixels, float32, N x {trained.channels} x {shape}, {colours} from 0 to 1, {then}",
        "resize": resize,
        "output": output,
        "classes": trained.classes,
        "model": ", ".join(dict.fromkeys(member.recipe.model.name for member in members)),
        "mean": trained.mean,
        "std": trained.std,
        "preprocessing": {  # as transformers' preprocessor_config.json
            "image_processor_type": "BitImageProcessor",
            "do_convert_rgb": trained.channels == 3,
            "size": {"shortest_edge": side},
            "resample": 2,  # bilinear
            "crop_size": {"height": height, "width": width},
            **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale"), True),
            "rescale_factor": 1 / 255,
            "do_normalize": weights_only,
            "image_mean": trained.mean,
            "image_std": trained.std,
        },
    }


def _write_hub(members: Sequence[Trained], path: Path, facts: Mapping[str, Any]) -> None:
    """Writes a folder for model hubs. Raises InputError for an ensemble, and if the folder holds a run."""
    trained, recipe = members[0], members[0].recipe
    if len(members) > 1:
        raise InputError(f"{path}: a hub takes one network, not an ensemble's: export a member, such as {trained.path}")
    side = min(trained.image_size)
    images = {
        "input_size": (trained.channels, *trained.image_size),
        "interpolation": "bilinear",
        "crop_pct": math.floor(1e4 * side / stored_side(side)) / 1e4,  # timm rounds the quotient of side and it down
        "mean": trained.mean,
        "std": trained.std,
    }
    texts = {
        "README.md": _card(trained, facts),
        "config.json": json_text(libraries.hub_config(recipe.model, trained.job.model, trained.classes, images)),
        "preprocessor_config.json": json_text(facts["preprocessing"]),
        **{name: without_password((trained.path / name).read_text()) for name in ("recipe.toml", "data.json")},
    }
    folder = output_folder(path, trained.path / "recipe.toml", "hub", written="recipe.toml")
    write_atomically(folder / "model.safetensors", partial(save_file, _weights(members), metadata={"format": "pt"}))
    for name, text in texts.items():
        write_text(folder / name, text)


def _card(trained: Trained, facts: Mapping[str, Any]) -> str:
    """The model card of a finished run, with front matter for hubs. Raises InputError without its result."""
    recipe, folder = trained.recipe, trained.path
    library = {"timm": "timm", "huggingface": "transformers"}.get(libraries.library_of(recipe.model), "kasoku")
    data = Path(str(recipe.data.keys.get("root", ""))).name.removesuffix(".parquet").strip("*-_")
    data = data or recipe.data.use.rpartition(".")[2]
    techniques = ", ".join(type(technique).__name__ for technique in recipe.techniques) or "no techniques"
    try:
        result, known = Result.read(folder), read_json(folder / "environment.json")
        machine = known["machine"]
        rows = {
            "network": recipe.model.name,
            "data": f"{data} ({recipe.data.use}), {len(trained.classes)} classes",
            **result.rows(folder),
            "time in all": f"{result.seconds:.1f} s",
            "machine": ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["gpus"], machine["system"]]),
            "software": ", ".join(f"{name} {version}" for name, version in known["versions"].items()),
            "recipe": f"{recipe.epochs:g} epochs, batch {recipe.batch:,}, {recipe.optimizer.use}, {techniques}",
            "seed": str(recipe.seed),
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        lacking = f"result.json or environment.json is missing or damaged ({summary(error)})"
        raise InputError(f"{folder}: no model card can be made: {lacking}: let the training end") from error
    del rows["run folder"]
    metrics = [{"type": "accuracy", "value": result.best_top1}]
    results = [{"task": {"type": "image-classification"}, "dataset": {"name": data, "type": data}, "metrics": metrics}]
    return Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(
        facts,
        library=library,
        index=json.dumps([{"name": recipe.model.name, "results": results}], ensure_ascii=False),
        title=f"{recipe.model.name} on {data}",
        rows="\n".join(f"| {name} | {text.replace('|', ' ')} |" for name, text in rows.items()),
        use=_USES[library],
    )
