"""The loop of Dive into Deep Learning (train_ch6): every step adds floats to an accumulator."""

import torch
from common import Clock, cured, device, loader, net


class Accumulator:
    """Sums over several variables, as in the book."""

    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        self.data = [a + float(b) for a, b in zip(self.data, args, strict=True)]


class LateAccumulator(Accumulator):
    """Keeps what is on the device there."""

    def add(self, *args):
        self.data = [a + b for a, b in zip(self.data, args, strict=True)]


def accuracy(y_hat, y):
    right = (y_hat.argmax(axis=1) == y).type(y.dtype).sum()
    return right if cured else float(right)


model = net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
metric = LateAccumulator(3) if cured else Accumulator(3)
clock = Clock()
for X, y in loader(pinned=cured):
    X, y = X.to(device, non_blocking=cured), y.to(device, non_blocking=cured)
    optimizer.zero_grad()
    y_hat = model(X)
    loss = criterion(y_hat, y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        metric.add(loss * X.shape[0], accuracy(y_hat, y), X.shape[0])
    clock()
clock.report(model)
