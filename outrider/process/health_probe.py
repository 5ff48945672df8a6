"""`python -m outrider.process.health_probe HOST:PORT [CA [CERT KEY]]`: exits 0 when the server there is SERVING.

With the authority of its certificate it asks over TLS, and shows a certificate of its own where one is given.
For containers, so it never imports torch: a probe that takes seconds to start is no probe.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidRequest
from outrider.rpc.channels import check_address, open_blocking_channel
from outrider.rpc.tls import Tls, TlsFiles, why_refused

TIMEOUT_S = 3.0
USAGE_EXIT_CODE, UNAVAILABLE_EXIT_CODE = 64, 69


def is_serving(address: str, tls: TlsFiles | None = None, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the server as a whole says SERVING within the time."""
    with open_blocking_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """The exit code for the command line."""
    if len(sys.argv) not in (2, 3, 5):
        sys.stderr.write("usage: python -m outrider.process.health_probe HOST:PORT [CA [CERT KEY]]\n")
        return USAGE_EXIT_CODE
    try:
        address = check_address("address", sys.argv[1])
        tls = Tls(*sys.argv[2:]) if sys.argv[2:] else None
        files = TlsFiles.of(tls)
    except InvalidRequest as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    if is_serving(address, files):
        return 0
    sys.stderr.write(f"{why_refused(address, tls) or f'{address} is not serving.'}\n")
    return UNAVAILABLE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
