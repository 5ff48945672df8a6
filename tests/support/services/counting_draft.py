"""A quick draft over a real server that guesses the numbers after the last token, waits when told, and may lie."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from outrider.model_files.digests import VocabularyDigests
from outrider.rpc.fencing import PROTOCOL_VERSION
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from outrider.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server

SIZE = 1000
VOCABULARY = VocabularyDigests.of((f"token {number}", number) for number in range(SIZE))


class CountingDraft(DraftServiceServicer, ModelServiceServicer):
    """Guesses t + 1, t + 2, ... modulo the vocabulary after a token t. `change` alters each answer before it is sent;
    while `gate` is closed nothing is answered. `last` has the last token of every session that is open.
    """

    def __init__(self, context_len: int = 8192) -> None:
        self.change: Callable[[pb.ProposeResponse], None] = lambda answer: None
        self.gate = threading.Event()
        self.gate.set()
        self.last: dict[bytes, int] = {}
        self.num_frames = 0
        self.num_requests = 0
        self.facts = model_pb.GetModelInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            role=model_pb.SERVICE_ROLE_DRAFT,
            instance_id=threading.get_ident() ^ id(self),
            model_name="counting",
            context_len=context_len,
            max_draft_count=64,
            vocabulary_size=SIZE,
            vocabulary_digests=VOCABULARY.digests,
        )
        self.address = ""
        self._server: grpc.Server | None = None

    def start(self, address: str = "127.0.0.1:0") -> Self:
        """Serves, on any free port or again on the same one."""
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        add_DraftServiceServicer_to_server(self, self._server)
        add_ModelServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        self._server.start()
        return self

    def stop(self) -> None:
        """Ends all calls at once."""
        self.gate.set()
        if self._server is not None:
            self._server.stop(0).wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def GetModelInfo(self, request: model_pb.GetModelInfoRequest, context: Any) -> model_pb.GetModelInfoResponse:  # noqa: N802
        return self.facts

    def Rollback(self, request: model_pb.RollbackRequest, context: Any) -> model_pb.RollbackResponse:  # noqa: N802
        return model_pb.RollbackResponse(fence=request.fence)

    def Link(  # noqa: N802
        self, request_iterator: Iterator[pb.DraftServiceLinkRequest], context: Any
    ) -> Iterator[pb.DraftServiceLinkResponse]:
        for frame in request_iterator:
            self.num_frames += bool(frame.requests)
            answers = [answer for request in frame.requests if (answer := self._answer(request)) is not None]
            self.gate.wait()
            if answers:
                yield pb.DraftServiceLinkResponse(instance_id=self.facts.instance_id, responses=answers)

    def _answer(self, request: pb.ProposeRequest) -> pb.ProposeResponse | None:
        session_id, what = request.fence.session_id, request.WhichOneof("action")
        self.num_requests += 1
        if what == "close":
            self.last.pop(session_id, None)
        if what in {"close", "part"}:
            return None
        answer = pb.ProposeResponse(fence=request.fence, cached_len=request.fence.base_len)
        if what == "open":
            tokens, count = request.open.session.token_ids, request.open.draft_count
        else:
            tokens, count = request.advance.token_ids, request.advance.draft_count
            if session_id not in self.last:
                answer.tokens_wanted.CopyFrom(types_pb2.TokensWanted(known_len=0))
                return answer
        if tokens:
            self.last[session_id] = tokens[-1]
        first = self.last[session_id] + 1
        answer.proposal.token_ids.extend(number % SIZE for number in range(first, first + count))
        self.change(answer)
        return answer
