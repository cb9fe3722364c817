"""A config-driven experiment runner for distributed PyTorch: ``python -m ddp_runner``."""

__version__ = "0.1.0"
