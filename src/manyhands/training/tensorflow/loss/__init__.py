"""The loss of a Keras model: what is called with which parts of a batch, and how the parts of a batch add up."""
