"""Connections of HTTP/2 that begin to speak and say no more, as bytes."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# The head of a call of Health's Check, whose message does not come: its fields as HTTP/2 has them, in a frame.
FIELDS = b"\x83\x86\x04\x1c/grpc.health.v1.Health/Check\x01\x01x\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
CALL = len(FIELDS).to_bytes(3, "big") + b"\1\4\0\0\0\1" + FIELDS
