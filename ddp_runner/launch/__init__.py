"""Start and watch the ranks of one run on this machine."""
