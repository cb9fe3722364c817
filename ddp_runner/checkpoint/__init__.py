"""Checkpoints: an atomic store, its manifests, and the weights that a run leaves."""
