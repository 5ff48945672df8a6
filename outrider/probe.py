"""`python -m outrider.probe HOST:PORT`: exits 0 when the gRPC health service there answers SERVING. For containers.

Never imports torch: a probe that takes seconds to start is no probe.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidRequest
from outrider.rpc.channels import check_address

TIMEOUT_S = 3.0
USAGE_EXIT_CODE, UNAVAILABLE_EXIT_CODE = 64, 69


def is_serving(address: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the server as a whole says SERVING within the time."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    """The exit code for the command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m outrider.probe HOST:PORT\n")
        return USAGE_EXIT_CODE
    try:
        address = check_address("address", sys.argv[1])
    except InvalidRequest as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    if is_serving(address):
        return 0
    sys.stderr.write(f"{address} is not serving.\n")
    return UNAVAILABLE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
