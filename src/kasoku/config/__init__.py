"""Recipes: TOML documents and the frozen dataclasses they become."""
