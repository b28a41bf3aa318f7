"""The commands of kasoku, one file a verb; `arguments` has the options of all."""
