"""Runs many jobs with one command: grids and searches, on this machine or on Slurm."""
