"""TensorFlow: its devices, its graphs, and ``tf.function`` as the way to run them."""
