"""The modes of parallelism, one file each."""
