"""Models that take slow steps while a file exists.

With them a test reaches a run in mid-training on any machine, and then lets it go on at full speed.
"""

from dataclasses import dataclass
from pathlib import Path

STEP_S = 0.1
MODULE = f'''
import os, time
from pathlib import Path

from ddp_runner.models.convnet import ConvNet
from ddp_runner.models.toy import ToyModel


class Slowed:
    def forward(self, inputs):
        if self.training and Path(os.environ["SLOW_WHILE_THERE"]).exists():
            time.sleep({STEP_S})
        return super().forward(inputs)


class Toy(Slowed, ToyModel):
    """The toy model."""


class Conv(Slowed, ConvNet):
    """The ConvNet."""
'''
TOY = ("model=toy", "model._target_=slowed_models.Toy", "allowed_targets=[slowed_models]")
CONVNET = ("model=convnet", "model._target_=slowed_models.Conv", "allowed_targets=[slowed_models]")


@dataclass(frozen=True)
class SlowModels:
    """The models' module in a folder; they are slow until ``release``."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """The variables that a command with one of these models needs."""
        return {"PYTHONPATH": str(self.folder), "SLOW_WHILE_THERE": str(self.folder / "slow")}

    def release(self) -> None:
        """Let the models run at full speed."""
        (self.folder / "slow").unlink()


def slow_models(folder: Path) -> SlowModels:
    """Write the models' module and the file that slows them into a new folder."""
    folder.mkdir()
    (folder / "slowed_models.py").write_text(MODULE)
    (folder / "slow").touch()
    return SlowModels(folder)
