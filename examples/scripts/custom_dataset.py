"""A data set of your own: images in files, changed at random, read by the workers of a DataLoader.

    python examples/scripts/custom_dataset.py [--folder IMAGES] [--devices cpu:2]

``IMAGES/circle/*.png`` and ``IMAGES/square/*.png`` are made if they are not there. What ``__getitem__`` draws at
random depends on the seed, the epoch and the sample alone, so a job that is stopped and resumed sees the very same
images.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import DataLoader, Dataset

from manyhands import torch as mh

CLASSES = ("circle", "square")


def make_images(folder: Path, count: int) -> None:
    generator = random.Random(0)
    for number in range(count):
        kind = CLASSES[number % 2]
        picture = Image.new("L", (32, 32))
        x, y, size = generator.randint(1, 12), generator.randint(1, 12), generator.randint(10, 18)
        draw = ImageDraw.Draw(picture)
        (draw.ellipse if kind == "circle" else draw.rectangle)((x, y, x + size, y + size), fill=200)
        (folder / kind).mkdir(parents=True, exist_ok=True)
        picture.save(folder / kind / f"{number:04}.png")


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, folder: Path, *, training: bool) -> None:
        paths = sorted(folder.glob("*/*.png"), key=lambda path: path.name)
        self.paths = paths[:-60] if training else paths[-60:]
        self.training = training

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        image = torch.from_numpy(np.asarray(Image.open(path), dtype="float32"))[None] / 255
        if self.training:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image + 0.05 * torch.randn(image.shape)
        return image, CLASSES.index(path.parent.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of the images; default: one that is deleted at the end")
    parser.add_argument("--devices", default="auto", help="default: all GPUs, else the CPU")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not list(folder.glob("*/*.png")):
            make_images(folder, 360)
        training = DataLoader(
            ImageFolder(folder, training=True), batch_size=30, shuffle=True, num_workers=options.workers
        )
        validation = DataLoader(ImageFolder(folder, training=False), batch_size=30)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.LazyLinear(2),
        )  # fmt: skip
        trainer = mh.Trainer(max_epochs=options.epochs, devices=options.devices, optimizer="adam", lr=0.01)
        print(trainer.fit(model, training, validation))


if __name__ == "__main__":
    main()
