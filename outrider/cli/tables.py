"""What is told in figures: the line behind an answer, log-probabilities, models. Prints nothing."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.cli.model_facts import ModelFacts
from outrider.client import GeneratedToken, PromptToken, Result
from outrider.parameters import Acceptance, Rule, TokenLogprob

# Control characters but tab and newline become their pictures: a model must not drive the reader's terminal.
CONTROL_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)


def figures(result: Result) -> str:
    """The last line: how many tokens, how fast, what speculation did, and the seed that replays it."""
    told = result.speculation
    parts = [
        f"{result.completion_tokens} tokens",
        f"{result.tokens_per_second:.0f} tokens/s",
        f"{told.rounds} rounds",
        f"acceptance rate {told.acceptance_rate:.2f}",
        f"mean acceptance length {told.mean_acceptance_length:.2f}",
        f"{told.fallback_rounds} fallback rounds",
        f"seed {result.seed}",
    ]
    if result.acceptance.rule is not Rule.MATCH:
        parts.append(rule_told(result.acceptance))
    if result.target_reopens:
        parts.append(f"{result.target_reopens} times opened again on a target")
    if len(result.numerics_ids) > 1:
        # Only then the seed does not repeat the text.
        parts.append(f"moved between the numerics {' and '.join(result.numerics_ids)}")
    return ", ".join(parts)


def rule_told(acceptance: Acceptance) -> str:
    """The rule that decided, its settings, and whether the answer is another one than the target's."""
    settings = " and ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in acceptance.settings.items())
    told = f"rule {acceptance.rule}" + (f" with {settings}" if settings else "")
    return told if acceptance.rule.is_exact else f"{told}: does not follow the target's distribution"


def logprob_table(prompt: Sequence[PromptToken], tokens: Sequence[GeneratedToken]) -> Table:
    """One row a token, the prompt's dim; alternatives are ids, because only the gateway knows their texts."""
    table = Table("token", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", justify="right")
    table.add_column("logprob", justify="right")
    rows: list[PromptToken | GeneratedToken] = [*prompt, *tokens]
    if any(each.logprob and each.logprob.top_token_ids for each in rows):
        table.add_column("most probable")
    for place, each in enumerate(rows):
        cells = (repr(each.text.translate(CONTROL_PICTURES)), str(each.token_id), *_numbers(each.logprob))
        table.add_row(*map(Text, cells[: len(table.columns)]), style="dim" if place < len(prompt) else "")
    return table


def _numbers(logprob: TokenLogprob | None) -> tuple[str, str]:
    """A log-probability, and the alternatives with theirs."""
    if logprob is None:
        return "", ""
    alternatives = zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
    return f"{logprob.logprob:.3f}", "  ".join(f"{token_id} {value:.3f}" for token_id, value in alternatives)


def model_table(facts: Sequence[ModelFacts], metrics: Mapping[str, str]) -> Table:
    """One column a model, so that the table fits into a narrow terminal. `metrics` are addresses by role."""
    table = Table("role", *(fact.role for fact in facts))
    table.add_row("model", *(fact.model for fact in facts))
    table.add_row("parameters", *(f"{fact.parameters:,}" for fact in facts))
    table.add_row("dtype", *(fact.dtype for fact in facts))
    table.add_row("device", *(fact.device for fact in facts))
    table.add_row("threads", *(str(fact.threads) for fact in facts))
    table.add_row("numerics id", *(fact.numerics_id for fact in facts))
    table.add_row("context", *(f"{fact.context_len:,} tokens" for fact in facts))
    table.add_row("KV blocks", *(f"{fact.blocks:,} of {fact.block_size} tokens" for fact in facts))
    table.add_row("address", *(fact.address for fact in facts))
    table.add_row("metrics", *(metrics.get(fact.role, "") for fact in facts))
    return table


def model_line(fact: ModelFacts, metrics: str | None) -> str:
    """What the table says about a model, as one line."""
    parts = [
        f"The {fact.role}: {fact.model}",
        f"{fact.parameters:,} parameters in {fact.dtype}",
        f"{fact.device} with threads: {fact.threads}",
        f"numerics {fact.numerics_id}",
        f"context of {fact.context_len:,} tokens",
        f"{fact.blocks:,} KV blocks of {fact.block_size} tokens",
        f"answers on {fact.address}",
    ]
    return ", ".join([*parts, f"metrics on {metrics}"] if metrics else parts)
