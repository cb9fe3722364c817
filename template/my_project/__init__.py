"""A training of your own, with ddp_runner: ``python -m my_project``."""
