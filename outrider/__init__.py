"""Speculative decoding as two gRPC services and a gateway; `outrider.client` is the Python client."""

__version__ = "0.2.0"
