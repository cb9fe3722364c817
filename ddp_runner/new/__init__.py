"""The command ``ddp-runner new``: a project of the user's own to start from. Torch-free."""
