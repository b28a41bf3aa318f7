"""The recipes that come with kasoku. A bare name stands for one, wherever a recipe file is wanted."""

from pathlib import Path

RECIPES = {file.stem: file for file in sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))}


def locate(name: str | Path) -> Path:
    """The file of a recipe: the named file if it is there, NAME.toml in the current folder, or ours of this name."""
    path = Path(name)
    own = path.with_name(f"{path.name}.toml")
    if path.parent != Path() or path.is_file() or not path.name:
        return path
    return own if own.is_file() else RECIPES.get(path.name.removesuffix(".toml"), path)
