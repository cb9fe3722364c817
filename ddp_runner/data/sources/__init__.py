"""Where datasets come from, one file each."""
