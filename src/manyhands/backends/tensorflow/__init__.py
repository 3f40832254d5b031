"""TensorFlow: its devices, how functions are handed to ``tf.function``, and what explicit tasks need of it."""
