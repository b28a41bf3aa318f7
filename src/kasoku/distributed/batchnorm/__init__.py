"""BatchNorm over groups of images, on any number of ranks."""
