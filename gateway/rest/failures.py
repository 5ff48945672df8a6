"""Turns whatever ends a request early into an answer in the shape of all errors. Knows no route."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.rest.errors import UnknownRoute, WrongMethod, error_response, status_of
from gateway.rest.findings import error_about
from outrider.errors import OutriderError


async def told(_: Request, error: Exception) -> Response:
    """An error of ours."""
    assert isinstance(error, OutriderError)
    return error_response(error)


async def misfit(_: Request, error: Exception) -> Response:
    """A body that is not what the route takes."""
    assert isinstance(error, RequestValidationError)
    return error_response(error_about(error.errors(), error.body))


async def unrouted(request: Request, error: Exception) -> Response:
    """A path or a method that nobody serves."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        wrong = WrongMethod(f"{path} does not take {request.method}", method=request.method)
        return error_response(wrong, error.headers)
    if error.status_code == 404:
        return error_response(UnknownRoute(f"There is nothing at {path}"))
    return _other(error)


def _other(error: HTTPException) -> Response:
    """What the framework refuses for a reason of its own."""
    told_error = OutriderError(str(error.detail))
    response = error_response(told_error, error.headers)
    response.status_code = error.status_code if error.status_code >= 400 else status_of(told_error)
    return response
