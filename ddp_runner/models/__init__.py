"""Models: plain modules that import torch only; the worker builds the one that the config names."""
