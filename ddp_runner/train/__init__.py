"""The training task, in ordinary PyTorch."""
