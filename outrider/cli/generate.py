"""`outrider generate`: one request, to a running gateway or to a stack that lives as long as it."""

import asyncio
import os
import sys
from collections import defaultdict, deque
from collections.abc import Iterator

from outrider.cli.local_stack import Stack, start_stack
from outrider.cli.options import RequestOptions, decoded, settings_of
from outrider.cli.running import Interrupts, Work, note, service_log
from outrider.cli.views import View
from outrider.client import AsyncClient, GenerationOptions, Result, Round
from outrider.client.requests import chat_request, generate_request
from outrider.errors import InvalidRequest, OutriderError
from outrider.process.children import Supervisor
from outrider.rpc.tls import Tls


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for "-". Raises InvalidRequest when it is not text."""
    return decoded("prompt", sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt))


def check_request(prompt: str, options: RequestOptions) -> None:
    """Raises InvalidRequest and PromptTooLong about what no gateway would receive, before one is started."""
    if options.echo and options.logprob_count is None:
        raise InvalidRequest("--echo", True, "given with --logprobs")
    generate_request(prompt, settings_of(options))


def check_chat(system: str, settings: GenerationOptions) -> None:
    """Checks the options of a conversation, whatever will be said in it. Raises InvalidRequest."""
    chat_request([{"role": "system", "content": system}], settings)


class InOrder:
    """Takes the mixed events of several samples and gives them sample by sample, in order of their index.

    Those of a sample are kept until the samples before it have ended, and from then on pass at once.
    """

    def __init__(self) -> None:
        self._current = 0
        self._kept: defaultdict[int, deque[Round | Result]] = defaultdict(deque)

    def take(self, event: Round | Result) -> Iterator[Round | Result]:
        """Yields the events that may be shown now."""
        self._kept[event.sample_index].append(event)
        while self._kept[self._current]:
            shown = self._kept[self._current].popleft()
            self._current += isinstance(shown, Result)
            yield shown


async def show_generation(
    address: str,
    prompt: str,
    options: RequestOptions,
    view: View,
    api_key: str | None = None,
    tls: Tls | None = None,
) -> None:
    """Streams one request into a view; being cancelled, it cancels the call.

    Raises the OutriderError that the gateway answered, PeerLost when there is no answer, InvalidRequest when it is no
    gateway that does.
    """
    view.begin(prompt, options)
    in_order = InOrder()
    try:
        async with (
            AsyncClient(address, api_key=api_key, tls=tls) as client,
            client.generate(prompt, **settings_of(options)) as stream,
        ):
            async for event in stream:
                for shown in in_order.take(event):
                    if isinstance(shown, Round):
                        view.show(shown)
                    else:
                        view.finish(shown)
    except (OutriderError, asyncio.CancelledError):
        view.interrupt()
        raise
    view.end()


def generation(
    prompt: str,
    options: RequestOptions,
    view: View,
    address: str | None,
    stack: Stack | None,
    api_key: str | None,
    tls: Tls | None,
) -> Work:
    """The work of the command: against `address`, or else within a stack of its own."""

    async def work(interrupts: Interrupts) -> None:
        if stack is None:
            await show_generation(address or "", prompt, options, view, api_key, tls)
            return
        async with Supervisor(note, service_log) as supervisor:
            interrupts.urgent = supervisor.kill
            addresses = await start_stack(supervisor, stack)
            await show_generation(addresses.gateway, prompt, options, view, api_key)

    return work
