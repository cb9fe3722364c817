"""This machine and this process: hardware, load, signals, streams, processes. Torch-free."""
