"""Sessions of the services, which outlive the services that hold them."""
