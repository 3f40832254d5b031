"""A loss as a scalar of the older arrays."""

import mxnet as mx
from mxnet import autograd, gluon

mx.npx.set_np()
net = gluon.nn.Dense(4)
net.initialize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
x, y = mx.np.ones((8, 16)), mx.np.zeros(8)
for step in range(6):
    with autograd.record():
        loss = loss_of(net(x), y).mean()
    loss.backward()
    trainer.step(8)
    last = loss.as_nd_ndarray().asscalar()  # planted: read
