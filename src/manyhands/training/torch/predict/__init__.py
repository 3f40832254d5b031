"""What a prediction is made of: the measured step of one device, and the measured link between devices."""
