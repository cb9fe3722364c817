"""A config-driven experiment runner for distributed PyTorch: ``python -m ddp_runner``."""
