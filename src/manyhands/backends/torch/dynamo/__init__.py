"""What Dynamo captures: graphs of ``torch.compile``, and functions in pieces."""
