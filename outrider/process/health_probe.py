"""`python -m outrider.process.health_probe [--live] HOST:PORT [CA [CERT KEY]]`: 0 when the server there is SERVING.

With the authority of its certificate it asks over TLS, and shows a certificate of its own where one is given. With
`--live` any answer will do, also that it drains or that it admits no client with this certificate: only of a process
that hangs there is none.
For containers, so it never imports torch: a probe that takes seconds to start is no probe.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidRequest
from outrider.rpc.channels import open_blocking_channel
from outrider.rpc.tls import Tls, TlsFiles, why_refused
from outrider.rpc.wire import check_address

TIMEOUT_S = 3.0
USAGE_EXIT_CODE, UNAVAILABLE_EXIT_CODE = 64, 69
SERVING, LIVE = "SERVING", "--live"


def status_of(address: str, tls: TlsFiles | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Status of the server as a whole, such as SERVING; empty where it says nothing within the time."""
    with open_blocking_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> int:
    """The exit code for the command line."""
    is_for_life = sys.argv[1:2] == [LIVE]
    words = sys.argv[1 + is_for_life :]
    if len(words) not in (1, 2, 4):
        sys.stderr.write(f"usage: python -m outrider.process.health_probe [{LIVE}] HOST:PORT [CA [CERT KEY]]\n")
        return USAGE_EXIT_CODE
    try:
        address = check_address("address", words[0])
        tls = Tls(*words[1:]) if words[1:] else None
        files = TlsFiles.of(tls)
    except InvalidRequest as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    status = status_of(address, files)
    if status == SERVING:
        return 0
    why = "" if status else why_refused(address, tls)
    if is_for_life and (status or why):
        return 0
    sys.stderr.write(f"{why or f'{address} is not serving.'}\n")
    return UNAVAILABLE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
