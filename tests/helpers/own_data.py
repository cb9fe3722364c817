"""What tests of a user's dataset need besides the dataset."""

from ddp_runner.data.loader import LoaderSplit


def end_workers(split: LoaderSplit) -> None:
    """End a split's workers at once; a run leaves that to the end of its process."""
    iterator = vars(split)["_loader"]._iterator if "_loader" in vars(split) else None
    if iterator is not None:
        iterator._shutdown_workers()
