"""One rank's process, whatever its task."""
