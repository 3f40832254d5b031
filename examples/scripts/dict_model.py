"""A model as those of Hugging Face's transformers: batches are dicts, and the output has the loss in it.

    python examples/scripts/dict_model.py --devices cpu:2

A batch goes to the model by name, ``model(**batch)``, and ``output.loss`` is the loss. It is a mean over *tokens*:
padding (label -100) does not count, and devices get different numbers of tokens. The update is exact all the same, as
the last line shows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from manyhands import torch as mh

WORDS, PADDING = 12, 0


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Tagger(nn.Module):
    """Says for each word whether it is larger than the word before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=PADDING)
        self.context = nn.GRU(16, 32, batch_first=True)
        self.scores = nn.Linear(32, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.scores(self.context(self.embedding(input_ids))[0])
        loss = None if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of 3 to 10 words, padded to 10. A sample is a dict; what the model has no argument for is left out."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, WORDS, (count, 10), generator=generator)
        self.lengths = torch.randint(3, 11, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        padded = torch.arange(10) >= self.lengths[index]
        words = self.words[index].masked_fill(padded, PADDING)
        larger = (words > words.roll(1)).long()
        larger[0] = -100  # the first word has none before it
        return {"input_ids": words, "labels": larger.masked_fill(padded, -100), "length": self.lengths[index]}


def train(devices: str | None, epochs: int) -> tuple[Tagger, mh.Result]:
    torch.manual_seed(0)
    model = Tagger()
    trainer = mh.Trainer(
        max_epochs=epochs, batch_size=32, devices=devices, optimizer="adam", lr=0.01, precision="fp64", quiet=True
    )
    result = trainer.fit(model, Sentences(512, seed=1), Sentences(128, seed=2))
    return model, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="default: all GPUs, else the CPU")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    model, result = train(options.devices, options.epochs)
    print(result)
    reference, _ = train("cpu", options.epochs)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    print("difference to one device:", max(float((a.cpu() - b).detach().abs().max()) for a, b in pairs))


if __name__ == "__main__":
    main()
