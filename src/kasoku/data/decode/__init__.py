"""From image bytes to pixels."""
