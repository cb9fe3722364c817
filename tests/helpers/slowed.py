"""Models that take their steps slowly while a file exists; a helper of the tests, not a test.

A test that must meet a run in mid-training waits for it in this way however fast or busy the
machine is, and then lets it go on at full speed.
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
class Brake:
    """Slows the models down until it is let go."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """The variables that a command with such a model needs."""
        return {"PYTHONPATH": str(self.folder), "SLOW_WHILE_THERE": str(self.folder / "slow")}

    def let_go(self) -> None:
        """Go on at full speed."""
        (self.folder / "slow").unlink()


def brake(folder: Path) -> Brake:
    """Write the models' module into a new folder, and the file that slows them down."""
    folder.mkdir()
    (folder / "slowed_models.py").write_text(MODULE)
    (folder / "slow").touch()
    return Brake(folder)
