"""The book's training loop, which prints the loss of every minibatch; and the same loop, which keeps the losses.

manyhands audit book_loop.py printed        # or: kept
"""

import sys

import torch
from torch import nn

from manyhands import torch as mh


def train(way: str, minibatches: int, width: int = 256) -> list[float]:
    torch.manual_seed(0)
    device = mh.try_gpu()
    net = mh.to(nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)), device)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)
    X, y = mh.to((torch.rand(64, 784), torch.randint(10, (64,))), device)
    losses = []
    for minibatch in range(minibatches):
        optimizer.zero_grad()
        batch_loss = loss(net(X), y)
        batch_loss.backward()
        optimizer.step()
        if way == "printed":
            print(f"minibatch {minibatch}: loss {batch_loss.item():.3f}")
        losses.append(batch_loss.detach())
    return mh.to(torch.stack(losses), mh.cpu()).tolist()


if __name__ == "__main__":
    train(sys.argv[1], minibatches=30)
