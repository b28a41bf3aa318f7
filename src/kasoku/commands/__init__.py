"""The commands of kasoku, one file a verb."""

from kasoku.commands.options import AllowArguments, CommandArguments, OptionalRecipe, RecipeArguments, argument, option

__all__ = ["AllowArguments", "CommandArguments", "OptionalRecipe", "RecipeArguments", "argument", "option"]
