"""Where samples come from: arrays and ``tf.data``."""
