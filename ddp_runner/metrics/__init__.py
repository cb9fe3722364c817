"""Metrics of an evaluation: the ones that we ship, and how any metric is taken over all ranks."""
