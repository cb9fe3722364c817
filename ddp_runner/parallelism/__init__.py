"""The forms of parallelism: a file each, or a folder if it needs more."""
