"""The book's training loop, which prints the loss of every minibatch; and the same loop, which keeps the losses.

manyhands audit book_loop.py printed        # or: kept
"""

import sys

import mxnet as mx
from mxnet import autograd, gluon

from manyhands import mxnet as mh


def train(way: str, minibatches: int, width: int = 256) -> list[float]:
    mx.random.seed(0)
    device = mh.try_gpu()
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(width, activation="relu", in_units=784), gluon.nn.Dense(10, in_units=width))
    net.initialize(mx.init.Xavier(), ctx=device)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    X, y = mx.nd.random.uniform(shape=(64, 784), ctx=device), mx.nd.random.randint(0, 10, shape=(64,), ctx=device)
    losses = []
    for minibatch in range(minibatches):
        with autograd.record():
            batch_loss = loss(net(X), y).mean()
        batch_loss.backward()
        trainer.step(1)
        if way == "printed":
            print(f"minibatch {minibatch}: loss {batch_loss.asscalar():.3f}")
        losses.append(batch_loss)
    values: list[float] = mh.to(mx.nd.concat(*losses, dim=0), mh.cpu()).asnumpy().tolist()
    return values


if __name__ == "__main__":
    train(sys.argv[1], minibatches=30)
