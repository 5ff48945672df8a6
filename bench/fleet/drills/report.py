"""The tables of the drills, each of what was wanted."""

from collections.abc import Iterable, Mapping, Sequence

from bench.fleet.drills.figures import BACK, TARGETS, Drill, DrillRun, Extremes, extremes
from outrider.cli.bench.common import markdown

SHOWN_S = (1, 2, 5, 10, 15)


def shown(values: Extremes, form: str = ".2f") -> str:
    return " / ".join(f"{each:{form}}" for each in values)


def seconds(value: float | None) -> str:
    return "not" if value is None else f"{value:.2f}"


def all_drills(runs: Sequence[DrillRun], plain: Mapping[int, Sequence[int]]) -> str:
    """What must hold in each drill, and how the streams went on that had no part in it."""
    head = ["drill", "answers", "failed", "other tokens", "hurt", "gaps of others before", "after", "CPUs", "load"]
    rows = [
        [
            each.drill.value,
            str(len(each.answers)),
            str(len(each.failed)),
            str(len(each.differing(plain))),
            str(len(each.pauses_s)),
            shown(extremes(each.longest_rounds(each.began_s)), ".1f"),
            shown(extremes(each.longest_rounds(each.at_s)), ".1f"),
            f"{each.cpus:.0%}",
            f"{each.load_average:.1f}",
        ]
        for each in runs
    ]
    return markdown(head, rows)


def losses(runs: Iterable[DrillRun]) -> str:
    """Pauses, and what is left, where a target is lost."""
    head = [
        "drill",
        "pause, s",
        "pause, rounds",
        "tokens/s before",
        "least second",
        "after",
        "over expected",
        "back, s",
        "spread",
    ]
    rows = []
    for each in runs:
        if each.drill.is_loss:
            before, after = each.rate(each.began_s, each.at_s), each.rate(each.at_s + each.after_s / 2, each.ended_s)
            expected = before * (TARGETS - 1) / TARGETS
            rows.append(
                [
                    each.drill.value,
                    shown(extremes(each.pauses_s)),
                    shown(extremes(each.hurt_rounds), ".1f"),
                    f"{before:.0f}",
                    f"{each.least(each.rate):.0f}",
                    f"{after:.0f}",
                    f"{after / expected:.2f}",
                    seconds(each.back_s(each.rate, expected)),
                    f"{each.spread:.2f}",
                ]
            )
    return markdown(head, rows)


def newcomers(runs: Iterable[DrillRun]) -> str:
    """Sessions of a target that has joined, over time, and first tokens."""
    head = ["drill", *(f"{each} s" for each in SHOWN_S), "fair after, s", "first token before, s", "after, s"]
    rows = []
    for each in runs:
        if each.drill is Drill.JOINED:
            by_time = [[share for at_s, share in each.shares if at_s <= most] for most in SHOWN_S]
            rows.append(
                [
                    each.drill.value,
                    *(f"{found[-1]:.2f}" if found else "" for found in by_time),
                    seconds(each.fair_s),
                    shown(each.first_tokens_s(each.began_s, each.at_s)),
                    shown(each.first_tokens_s(each.at_s, each.ended_s)),
                ]
            )
    return markdown(head, rows)


def rolled(runs: Iterable[DrillRun]) -> str:
    """Requests that other weights answer while the targets are replaced."""
    found = [each for each in runs if each.drill is Drill.ROLLED]
    head = ["drill", *(f"{number} of {TARGETS} replaced" for number in range(TARGETS + 1))]
    return markdown(
        head, [[each.drill.value, *(f"{share:.2f} of {asked}" for asked, share in each.renewed)] for each in found]
    )


def drafts(runs: Iterable[DrillRun]) -> str:
    """What guesses bring, in the drills about drafts."""
    head = ["drill", "tokens a round before", "least second", "after", "back, s"]
    head += ["tokens/s before", "least second", "after", "back, s", "rounds without guesses"]
    rows = []
    for each in runs:
        if each.drill in {Drill.DRAFT_KILLED, Drill.DRAFTS_JOINED}:
            cells = [each.drill.value]
            for figure, form in ((each.tokens_a_round, ".2f"), (each.rate, ".0f")):
                before = figure(each.began_s, each.at_s)
                after = figure(each.at_s + each.after_s / 2, each.ended_s)
                level = after if each.drill is Drill.DRAFTS_JOINED else before
                least = each.least(figure)
                cells += [f"{before:{form}}", f"{least:{form}}", f"{after:{form}}", seconds(each.back_s(figure, level))]
            missing = each.fallbacks()
            cells.append(", ".join(f"{reason} {number}" for reason, number in missing.items()) or "none")
            rows.append(cells)
    return markdown(head, rows)


def report(runs: Sequence[DrillRun], plain: Mapping[int, Sequence[int]]) -> str:
    """All tables with a word on each."""
    parts = [
        all_drills(runs, plain),
        "Hurt: sessions that were opened again on another target. Gaps: the longest between two rounds of each stream "
        "that was not hurt, over its median one (p50 / p99 / most), as long before as after.",
    ]
    if any(each.drill.is_loss for each in runs):
        parts += [
            losses(runs),
            "Pauses: p50 / p99 / most of the hurt. Expected: what the targets that are left had before. Back: from "
            f"when on a second has {BACK:g} of that. Spread: most sessions that one target took over, over the mean.",
        ]
    if any(each.drill is Drill.JOINED for each in runs):
        parts += [newcomers(runs), "The newcomer's sessions over an equal share, so long after its address was listed."]
    if any(each.drill is Drill.ROLLED for each in runs):
        parts += [rolled(runs), "The share of the requests asked then that targets with other weights answered."]
    if any(each.drill in {Drill.DRAFT_KILLED, Drill.DRAFTS_JOINED} for each in runs):
        parts += [drafts(runs), "Back: to the level before, or where drafts have joined to that of the end."]
    return "\n\n".join(parts)
