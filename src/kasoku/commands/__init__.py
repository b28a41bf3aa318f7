"""The commands of kasoku, one file a verb."""

from kasoku.commands.options import CommandArguments, OptionalRecipe, RecipeArguments, argument, option

__all__ = ["CommandArguments", "OptionalRecipe", "RecipeArguments", "argument", "option"]
