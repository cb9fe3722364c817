"""``python -m ddp_runner.doctor``: what this machine, or all machines of a launch, are fit for."""
