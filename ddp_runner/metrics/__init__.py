"""Metrics of an evaluation: the shipped metrics, and the computation of any metric over ranks."""
