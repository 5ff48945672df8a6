"""gRPC between the processes: channels, errors, fences, messages."""
