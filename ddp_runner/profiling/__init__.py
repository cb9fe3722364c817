"""Traces of some steps of a run: from all ranks, on one clock, in one file."""
