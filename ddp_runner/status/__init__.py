"""``python -m ddp_runner.status``: which runs are alive, how far they are, and what is lost."""
