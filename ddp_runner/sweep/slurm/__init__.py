"""Runs the jobs of a sweep on Slurm."""
