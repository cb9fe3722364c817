"""Datasets as tensors, prepared once a machine, and the order in which ranks visit them."""
