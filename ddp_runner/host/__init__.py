"""This machine and this process: hardware, load, signals, streams, child processes. Torch-free."""
