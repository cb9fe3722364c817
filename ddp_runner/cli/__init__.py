"""The command line: Hydra in, an exit code and one plain sentence out."""
