"""What must hold between the keys of the model and those of the dataset.

Called by ``rules``, hence torch-free. A model's own keys follow the dataset's, so that only a user
who writes one of them can make them differ.
"""

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError


def validate_model(config: Config) -> None:
    """Refuse a model whose channels, classes or tokens are not the dataset's.

    Raises:
        UserError: a rule is broken.
    """
    wanted, given = config.model.get("in_channels"), config.dataset.get("channels")
    if None not in (wanted, given) and wanted != given:
        raise UserError(
            f"model.in_channels ({wanted}) differs from dataset.channels ({given}); leave it out: "
            "it follows the dataset"
        )
    wanted, given = config.model.get("num_classes"), config.dataset.get("num_classes")
    if isinstance(wanted, int) and isinstance(given, int) and wanted < given:
        raise UserError(
            f"model.num_classes ({wanted}) is less than dataset.num_classes ({given}); leave it "
            "out: it follows the dataset"
        )
    pretrained = config.model.get("pretrained")
    if pretrained is not None and config.dataset.get("tokenizer", "") is None:
        raise UserError(
            f"model.pretrained ({pretrained}) knows only its own tokens; leave out "
            "dataset.tokenizer, which follows it, or name its folder"
        )
