"""Who is there, for the page: gateway, target, draft, and K as the policy has it. Names no address and no path."""

from importlib.metadata import version
from typing import Any

from gateway.generation.backend import Backend
from gateway.generation.frontend import Frontend
from gateway.rounds.policy import MAX_DRAFT_COUNT
from gateway.sessions.link import ModelInfo
from gateway.sessions.replicas import Replicas

VERSION = version("outrider")


def status_view(door: Frontend, grpc_port: int) -> dict[str, Any]:
    """The state of this moment; asks nobody."""
    return {
        "gateway": {
            "up": True,
            "version": VERSION,
            "model": door.model_name,
            "grpc_port": grpc_port,
            "started_s": int(door.started_s),
            "running": door.admission.running,
            "waiting": door.admission.waiting,
            "places": door.admission.places,
        },
        "target": _service(door.backend.target),
        "draft": _service(door.backend.draft),
        "policy": _policy(door.backend),
    }


def _service(replicas: Replicas | None) -> dict[str, Any]:
    info = None if replicas is None else replicas.info
    return {"configured": replicas is not None, "up": info is not None, **_model(info), "reason": _reason(replicas)}


def _model(info: ModelInfo | None) -> dict[str, Any]:
    if info is None:
        return {"model": "", "model_hash": "", "numerics_id": "", "context_len": 0, "max_draft_count": 0}
    return {
        "model": info.model_name,
        "model_hash": info.model_hash,
        "numerics_id": info.numerics_id,
        "context_len": info.context_len,
        "max_draft_count": info.max_draft_count,
    }


def _reason(replicas: Replicas | None) -> str:
    """Why a service is not used, in a few words; the gateway's log has the sentence with the address."""
    if replicas is None:
        return "not configured"
    if replicas.info is not None:
        return ""
    return "does not answer" if replicas.misfit is None else "answers, but does not fit"


def _policy(backend: Backend) -> dict[str, Any]:
    limit = MAX_DRAFT_COUNT
    if backend.target.info is not None:
        limit = min(limit, backend.target.info.max_draft_count)
    has_draft = backend.draft is not None and backend.draft.info is not None
    # Without "ready" the question leaves the policy as it is.
    choice = backend.policy.choose(limit if has_draft else 0, ready=False)
    return {
        "draft_count": choice.draft_count,
        "acceptance_rate": backend.policy.acceptance_rate,
        "max_draft_count": limit,
    }
