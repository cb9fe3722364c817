"""A small DCGAN: your own loop with two modules and two optimizers.

    python -m ddp_runner --config-dir examples/gan/conf experiment=gan

After Radford, Metz and Chintala, https://arxiv.org/abs/1511.06434, and its PyTorch tutorial,
https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import make_grid

from ddp_runner import Run


class Generator(nn.Sequential):
    """Draw images (batch, 1, 28, 28) in -1 to 1 from noise (batch, latent)."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__(
            nn.Linear(latent, 2 * width * 7 * 7),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),  # 14 x 14
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),  # 28 x 28
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Give images (batch, 1, 28, 28) a score (batch,) each: high for real ones."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 4, stride=2, padding=1),  # 14 x 14
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),  # 7 x 7
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 1),
            nn.Flatten(0),
        )


def train(run: Run, *, latent: int, width: int, lr: float, epochs: int) -> None:
    """Train both networks; the arguments are the keys below ``loop``."""
    data = run.dataset()
    loader = run.loader(data.train)
    generator, discriminator = Generator(latent, width), Discriminator(width)
    # The run's mode of parallelism averages the gradients over the ranks.
    generate, discriminate = run.wrap(generator), run.wrap(discriminator)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=lr, betas=(0.5, 0.999))
    shown = torch.randn(64, latent, device=run.device)  # the same noise for each picture
    real_images, _ = next(iter(run.loader(data.eval, global_size=512, shuffle=False)))

    step = run.restore(
        generator=generator,
        discriminator=discriminator,
        g_optimizer=g_optimizer,
        d_optimizer=d_optimizer,
        loader=loader,
    )
    for _ in range(loader.epoch, epochs):
        generator.train()
        for images, _ in loader:
            real = scaled(images)
            fake = generate(torch.randn(len(real), latent, device=run.device))

            scores = discriminate(torch.cat([real, fake.detach()]))
            d_loss = loss(scores[: len(real)], 1.0) + loss(scores[len(real) :], 0.0)
            d_optimizer.zero_grad()
            (d_loss * loader.weight).backward()
            d_optimizer.step()

            # Not through its wrapper, which would average unused gradients.
            discriminator.requires_grad_(False)
            g_loss = loss(discriminator(fake), 1.0)
            discriminator.requires_grad_(True)
            g_optimizer.zero_grad()
            (g_loss * loader.weight).backward()
            g_optimizer.step()

            step += 1
            if step % 10 == 0:
                losses = {"d/loss": d_loss * loader.weight, "g/loss": g_loss * loader.weight}
                totals = run.sum(losses)
                run.log({name: one / run.world_size for name, one in totals.items()}, step=step)
            if run.should_stop(step):
                return
        generator.eval()
        with torch.no_grad():
            drawn = generator(shown)
        distance = pixel_distance(drawn, scaled(real_images))
        run.log({"eval/pixel_distance": distance}, step=step)
        run.log_image("samples", make_grid((drawn + 1) / 2), step=step)
        run.save(step)
    run.export(generator)


def loss(scores: Tensor, target: float) -> Tensor:
    """Return the mean cross-entropy of scores (batch,) with one target for all."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def scaled(images: Tensor) -> Tensor:
    """Return uint8 images as floats in -1 to 1, as the generator draws them."""
    return images / 127.5 - 1


def pixel_distance(drawn: Tensor, real: Tensor) -> Tensor:
    """Return how far each pixel's mean and deviation are from those of real images, a scalar.

    It is 0 for equal statistics, and tells at a glance whether the generator learns: a good score
    does not show that single images are good.
    """
    differences = drawn.mean(dim=0) - real.mean(dim=0), drawn.std(dim=0) - real.std(dim=0)
    return torch.stack(differences).square().mean().sqrt()
