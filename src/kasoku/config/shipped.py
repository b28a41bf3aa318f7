"""The recipes and the documents that come with kasoku. A name stands for a recipe, wherever a file is wanted."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"
_FILES = sorted(_FOLDER.rglob("*.toml"))
RECIPES = {  # by name, those of the documents as documents/000_NAME
    file.relative_to(_FOLDER).with_suffix("").as_posix(): file for file in _FILES if not file.stem.isdigit()
}
DOCUMENTS = {file.stem: file for file in _FILES if file.stem.isdigit()}  # documents/000.toml describes experiments


def locate(name: str | Path) -> Path:
    """The file of a recipe: the named file if it is there, NAME.toml in the current folder, or ours of this name."""
    path = Path(name)
    if path.is_file() or not path.name:
        return path
    own = path.with_name(f"{path.name}.toml")
    if path.parent == Path() and own.is_file():
        return own
    return RECIPES.get(path.as_posix().removesuffix(".toml"), path)
