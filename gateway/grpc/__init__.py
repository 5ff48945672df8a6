"""The gateway's own gRPC service."""
