"""Training with TensorFlow and Keras 3."""
