"""The report of a load as Markdown, and its plot: the speed-up of each setting over plain decoding by streams."""

from collections.abc import Iterable, Mapping, Sequence

from outrider.cli.bench.chart import Panel, line_chart
from outrider.cli.bench.common import PLAIN, markdown
from outrider.cli.bench.load.driver import Block
from outrider.cli.bench.load.summary import LoadFigures, client_share
from outrider.model_files.model_names import SIM_PREFIX

SYMBOLS = """\
Streams: requests side by side; each stream asks its next when its last has ended, and no prompt is asked twice. Figures
are of the time in which all streams run. Over plain, over the best fixed one (plain among them), over the best of these
that is no tree, and p99 over plain: medians of the ratios of blocks of the same turn, with intervals of 95 %
(bootstrap). Other brackets are quartiles: of tokens/s and rounds/s over turns, of gaps and first tokens over all that
were seen. A round is a message with tokens, a gap the time from one to the next of its answer, as the client saw it.
Accepted: of all draft tokens that were evaluated. Busy: share of the time in which a device computed."""


def is_simulated(models: Mapping[str, str]) -> bool:
    """Whether any of the models only waits as long as a real one would take."""
    return any(name.startswith(SIM_PREFIX) for name in models.values())


def name_of(models: Mapping[str, str]) -> str:
    """Name of what was served, for headings."""
    served = " with ".join(models[role] for role in ("target", "draft") if role in models)
    served = served or ", ".join(sorted(set(models.values()))) or "models of a running stack"
    return f"SIMULATED: {served}" if is_simulated(models) else served


def render(figures: Sequence[LoadFigures], blocks: Sequence[Block]) -> str:
    """Report of a run: all tables, and what their figures mean."""
    sections = []
    for temperature in dict.fromkeys(each.temperature for each in figures):
        rows = [each for each in figures if each.temperature == temperature]
        sections.append(f"### Temperature {temperature:g}\n\n{speeds(rows)}\n\n{waits(rows)}\n\n{costs(rows)}")
    equal, compared = (sum(getattr(each, f"{word}_answers") for each in figures) for word in ("equal", "compared"))
    sameness = " token for token" if equal == compared else "; under the rule match on a CPU all must be"
    share = f"The client took at most {client_share(blocks):.0%} of a core."
    sections.append(
        f"{equal} of {compared} answers that were asked for again are plain's{sameness}. {share}\n\n{SYMBOLS}"
    )
    return "\n\n".join(sections)


def table(figures: Iterable[LoadFigures], columns: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A table with the load and the setting in front."""
    heads = ((str(each.streams), each.setting) for each in figures)
    return markdown(("streams", "setting", *columns), ((*head, *row) for head, row in zip(heads, cells, strict=True)))


def speeds(figures: Sequence[LoadFigures]) -> str:
    """Table of what speculation brings."""
    return table(
        figures,
        (
            "tokens/s",
            "over plain",
            "over the best fixed",
            "over the best chain",
            "rounds/s",
            "tokens a round",
            "drafted a round",
            "accepted",
        ),
        (
            (
                each.tokens_per_s.show(".0f"),
                each.over_plain.show(".2f"),
                each.over_best_fixed.show(".2f"),
                each.over_best_chain.show(".2f"),
                each.rounds_per_s.show(".0f"),
                f"{each.tokens_per_round:.2f}",
                f"{each.drafted_per_round:.2f}",
                "-" if each.acceptance_rate is None else f"{each.acceptance_rate:.2f}",
            )
            for each in figures
        ),
    )


def waits(figures: Sequence[LoadFigures]) -> str:
    """Table of what a user waits for."""
    return table(
        figures,
        ("gap, ms", "p99 gap, ms", "p99 over plain", "first token, ms", "equal answers"),
        (
            (
                each.gap_s.show(".1f", 1e3),
                f"{each.p99_gap_s * 1e3:.1f}",
                each.p99_gap_over_plain.show(".2f"),
                each.first_token_s.show(".1f", 1e3),
                f"{each.equal_answers} of {each.compared_answers}" if each.compared_answers else "-",
            )
            for each in figures
        ),
    )


def costs(figures: Sequence[LoadFigures]) -> str:
    """Table of what a round costs each process, and how much of the time its device computes."""
    processes, devices = figures[0].cpu_per_round_s, figures[0].device_busy
    return table(
        figures,
        (*(f"{name}, us of CPU a round" for name in processes), *(f"device of {name}, busy" for name in devices)),
        (
            (
                *(f"{each.cpu_per_round_s[name] * 1e6:.0f}" for name in processes),
                *(f"{each.device_busy[name]:.0%}" for name in devices),
            )
            for each in figures
        ),
    )


def plot(figures: Sequence[LoadFigures], models: Mapping[str, str]) -> str:
    """An SVG: one panel a temperature, one line a setting."""
    panels = []
    for temperature in dict.fromkeys(each.temperature for each in figures):
        rows = [each for each in figures if each.temperature == temperature and each.setting != PLAIN]
        lines = {
            name: [(each.streams, each.over_plain) for each in rows if each.setting == name]
            for name in dict.fromkeys(each.setting for each in rows)
        }
        panels.append(Panel(f"temperature {temperature:g}", lines))
    return line_chart(name_of(models), "streams", "tokens/s over plain decoding", panels)
