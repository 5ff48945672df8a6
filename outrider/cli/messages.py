"""Between a request's plain values and its messages. Opens no connection."""

from outrider.cli.asking import Ask
from outrider.cli.asking import Sampling as SamplingOptions
from outrider.cli.asking import Speculation as SpeculationOptions
from outrider.cli.events import Origin, PromptToken, Result, Round, SpeculationFigures, Token
from outrider.cli.parsing import parse_biases, parse_draft_count
from outrider.parameters import TokenLogprob
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire_acceptance import RULES, acceptance_from, logprobs_from

ORIGINS = {
    pb.TOKEN_ORIGIN_ACCEPTED: Origin.ACCEPTED,
    pb.TOKEN_ORIGIN_CORRECTION: Origin.CORRECTION,
    pb.TOKEN_ORIGIN_BONUS: Origin.BONUS,
}


def request_from(ask: Ask) -> pb.GenerateRequest:
    """The message, with only those fields set that the user named: defaults belong to the gateway.

    Raises InvalidRequest about a draft count or bias that cannot be read.
    """
    answer = ask.answer
    return pb.GenerateRequest(
        text=ask.prompt,
        max_tokens=answer.max_tokens,
        sampling=_sampling(ask.sampling, answer.min_tokens, ignore_eos=answer.ignore_eos),
        seed=answer.seed,
        stop=answer.stop,
        stop_token_ids=answer.stop_token_ids,
        speculation=_speculation(ask.speculation),
        logprob_count=ask.report.logprobs,
        sample_count=answer.samples,
        banned_words=answer.banned_words,
        echo=ask.report.echo,
    )


def _sampling(options: SamplingOptions, min_tokens: int | None, *, ignore_eos: bool) -> types_pb2.SamplingParameters:
    return types_pb2.SamplingParameters(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=parse_biases(options.logit_bias or ()),
        min_tokens=min_tokens,
        ignore_eos=ignore_eos or None,
    )


def _speculation(options: SpeculationOptions) -> pb.SpeculationSettings:
    acceptance = types_pb2.AcceptanceSettings(
        lenience=options.lenience, typical_epsilon=options.typical_epsilon, typical_delta=options.typical_delta
    )
    return pb.SpeculationSettings(
        enabled=not options.no_speculation,
        draft_count=parse_draft_count(options.draft_count),
        rule=RULES[options.rule] if options.rule else types_pb2.ACCEPTANCE_RULE_UNSPECIFIED,
        drafter=options.drafter or "",
        acceptance=acceptance if acceptance.ListFields() else None,
    )


def event_from(message: pb.GenerateResponse) -> Round | Result:
    """What a message of the stream tells."""
    return _round(message.round) if message.HasField("round") else _result(message.completion)


def _round(message: pb.Round) -> Round:
    tokens = tuple(
        Token(each.token_id, ORIGINS.get(each.origin, Origin.PLAIN), each.text, _logprob(each))
        for each in message.tokens
    )
    prompt = tuple(PromptToken(each.token_id, each.text, _logprob(each)) for each in message.prompt_tokens)
    return Round(tokens, message.text_delta, message.sample_index, prompt)


def _logprob(token: pb.GeneratedToken | pb.PromptToken) -> TokenLogprob | None:
    return logprobs_from([token.logprob])[0] if token.HasField("logprob") else None


def _result(message: pb.Completion) -> Result:
    return Result(
        rest=message.text_delta,
        finish_reason=types_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower(),
        seed=message.seed,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=_figures(message.speculation),
        first_token_us=message.timings.first_token_us,
        total_us=message.timings.total_us,
        model_hash=message.model_hash,
        numerics_ids=tuple(message.numerics_ids) or (message.numerics_id,),
        target_reopens=message.survival.target_reopens,
        drift_repairs=message.survival.drift_repairs,
        sample_index=message.sample_index,
        acceptance=acceptance_from(message.rule, message.acceptance, "completion.rule", "completion.acceptance."),
    )


def _figures(message: pb.SpeculationFigures) -> SpeculationFigures:
    return SpeculationFigures(
        rounds=message.rounds,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        acceptance_rate=message.acceptance_rate,
        draft_acceptance_rate=message.draft_acceptance_rate,
        mean_acceptance_length=message.mean_acceptance_length,
        fallback_rounds=message.fallback_rounds,
    )
