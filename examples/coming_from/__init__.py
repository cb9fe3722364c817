"""One training as a torchrun script, with Accelerate, with Lightning, and with ddp_runner."""
