"""Tools over whole checkpoints: one file each, returning a Report."""
