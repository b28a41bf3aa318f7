"""The commands of kasoku, one file a verb."""

from kasoku.commands.options import CommandArguments, RecipeArguments, argument, option, set_option

__all__ = ["CommandArguments", "RecipeArguments", "argument", "option", "set_option"]
