"""The forms of parallelism, one file each; one that needs more is a folder."""
