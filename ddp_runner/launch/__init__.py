"""Starts and watches the ranks of one run on this machine."""
