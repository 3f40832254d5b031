"""TensorFlow's hooks."""
