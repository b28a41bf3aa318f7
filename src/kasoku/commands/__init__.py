"""The commands of kasoku, one file a verb."""
