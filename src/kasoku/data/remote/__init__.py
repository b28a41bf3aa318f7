"""Files read from remote storage, through a local cache."""
