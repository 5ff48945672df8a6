"""The gateway: text in, rounds out. It owns the truth of a request and never imports torch."""
