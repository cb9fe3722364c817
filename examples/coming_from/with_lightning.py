"""python -m examples.coming_from.with_lightning."""

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from examples.coming_from.digits import Digits, Net


class Classifier(lightning.LightningModule):
    """The network with its loss, its metric and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean loss of a batch."""
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        """Log the accuracy of a batch; Lightning averages it over the epoch and the ranks."""
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("eval/accuracy", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train on two ranks; Lightning starts the second one."""
    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_epochs=5, accelerator="auto", devices=2, strategy="ddp")
    loader = DataLoader(Digits("train"), batch_size=32, shuffle=True)
    trainer.fit(Classifier(), loader, DataLoader(Digits("eval"), batch_size=32))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['eval/accuracy']:.4f}")
    trainer.save_checkpoint("net.ckpt")


if __name__ == "__main__":
    main()
