"""From a request's options to a call of the client. Knows no protobuf and no terminal."""

from collections.abc import AsyncGenerator

from outrider.cli.asking import Answer, Ask, Report, Sampling, Speculation
from outrider.cli.parsing import parse_biases, parse_draft_count
from outrider.client import AsyncClient, Event, GenerationOptions, InvalidRequest
from outrider.client import Speculation as SpeculationSettings
from outrider.client.requests import chat_request, generate_request


async def generate(address: str, ask: Ask) -> AsyncGenerator[Event]:
    """Calls the gateway and yields its events; each sample's last is its Result. Closing the iterator cancels the call.

    Raises the OutriderError that the gateway answered, PeerLost when nobody answers, InvalidRequest when it is no
    gateway that does.
    """
    options = call_options(ask.answer, ask.sampling, ask.speculation, ask.report)
    async with AsyncClient(address) as client, client.generate(ask.prompt, **options) as stream:
        async for event in stream:
            yield event


def check_ask(ask: Ask) -> None:
    """Raises InvalidRequest about what cannot be read and PromptTooLong about what no gateway would receive.

    So nothing is started for such a request.
    """
    if ask.report.echo and ask.report.logprobs is None:
        raise InvalidRequest("--echo", True, "given with --logprobs")
    generate_request(ask.prompt, call_options(ask.answer, ask.sampling, ask.speculation, ask.report))


def check_chat(system: str, options: GenerationOptions) -> None:
    """The same for a conversation, whatever will be said in it."""
    chat_request([{"role": "system", "content": system}], options)


def call_options(
    answer: Answer, sampling: Sampling, speculation: Speculation, report: Report | None = None
) -> GenerationOptions:
    """The options as the client takes them; raises InvalidRequest about a draft count or bias that cannot be read."""
    report = report or Report()
    return GenerationOptions(
        max_tokens=answer.max_tokens,
        min_tokens=answer.min_tokens,
        ignore_eos=answer.ignore_eos or None,
        stop=answer.stop,
        stop_token_ids=answer.stop_token_ids,
        banned_words=answer.banned_words,
        seed=answer.seed,
        cache_salt=answer.cache_salt,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=parse_biases(sampling.logit_bias or ()),
        sample_count=report.samples,
        logprob_count=report.logprobs,
        echo=report.echo or None,
        speculation=speculation_settings(speculation),
    )


def speculation_settings(options: Speculation) -> SpeculationSettings:
    """Whether and how to speculate. Raises InvalidRequest about a draft count that cannot be read."""
    return SpeculationSettings(
        enabled=not options.no_speculation,
        draft_count=parse_draft_count(options.draft_count),
        rule=options.rule,
        drafter=options.drafter or "",
        lenience=options.lenience,
        typical_epsilon=options.typical_epsilon,
        typical_delta=options.typical_delta,
        return_rounds=bool(options.show_rejected),
    )
