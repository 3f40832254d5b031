"""A number of right answers as an integer."""

import tensorflow as tf

weights = tf.Variable(tf.ones((16, 4)))
optimizer = tf.keras.optimizers.SGD(0.1)
x, y = tf.ones((8, 16)), tf.zeros(8, tf.int32)


@tf.function
def update(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ weights))
    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return loss


for step in range(6):
    loss = update(x, y)
    right = int(tf.reduce_sum(tf.cast(y == 0, tf.float32)))  # planted: read
