"""accelerate launch --cpu --num_processes 2 -m examples.coming_from.with_accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from examples.coming_from.digits import Digits, Net


def main() -> None:
    """Train; the main process prints and saves."""
    accelerator = Accelerator()
    set_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Digits("train"), batch_size=32, shuffle=True)
    eval_loader = DataLoader(Digits("eval"), batch_size=32)
    model, optimizer, loader, eval_loader = accelerator.prepare(net, optimizer, loader, eval_loader)
    for epoch in range(5):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        right = count = 0
        with torch.no_grad():
            for images, labels in eval_loader:
                is_right = model(images).argmax(dim=1) == labels
                gathered = accelerator.gather_for_metrics(is_right)
                right, count = right + int(gathered.sum()), count + len(gathered)
        accelerator.print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {right / count:.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "net.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
