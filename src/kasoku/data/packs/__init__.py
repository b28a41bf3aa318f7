"""Packs: images in tar shards with an index."""
