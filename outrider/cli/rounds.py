"""Rounds in a terminal: tokens in the style of their origin, and guesses that branch as trees."""

from collections.abc import Iterator, Sequence

from rich.text import Text
from rich.tree import Tree

from outrider.client import GeneratedToken, Origin, RejectedToken, Round

# Never by colour alone: with NO_COLOR, or to eyes that see colours otherwise, the attributes still distinguish them.
STYLES = {
    Origin.ACCEPTED: "bold green",
    Origin.CORRECTION: "underline bright_red",
    Origin.BONUS: "italic yellow",
    Origin.PLAIN: "",
}
REJECTED_STYLE = "strike dim red"
MEANINGS = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.CORRECTION: "the target's correction",
    Origin.BONUS: "bonus behind an accepted draft",
    Origin.PLAIN: "plain",
}
# Control characters but tab and newline become their pictures: a model must not drive the reader's terminal.
CONTROL_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
KEPT, LOST, SKIPPED = "●", "\N{MULTIPLICATION SIGN}", "○"


def legend(*, rejected: bool) -> Text:
    """Key of the styles; that of rejected guesses only where they are shown."""
    parts = [Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items()]
    return Text("  ").join([*parts, Text("rejected guess", REJECTED_STYLE)] if rejected else parts)


def styled(event: Round) -> Text:
    """A round's text in the styles of its tokens' origins, rejected guesses before what the target said instead.

    Of guesses that branch only those at that place. When the tokens' shares do not make up the round's text, the text
    goes without styles.
    """
    if "".join(token.text for token in event.tokens) != event.text:
        return Text(event.text.translate(CONTROL_PICTURES))
    replaced = event.rejected
    if branches(event):
        replaced = tuple(guess for guess in event.rejected if guess.parent == _last_row(event))
    rejected = [Text(each.text.translate(CONTROL_PICTURES), REJECTED_STYLE) for each in replaced]
    shares = [Text(token.text.translate(CONTROL_PICTURES), STYLES[token.origin]) for token in event.tokens]
    corrected = bool(event.tokens) and event.tokens[-1].origin is Origin.CORRECTION
    place = len(shares) - corrected
    return Text().join([*shares[:place], *rejected, *shares[place:]])


def branches(event: Round) -> bool:
    """Whether the guesses of a round, as far as they are reported, are more than a chain."""
    rows = [token.row for token in event.tokens if token.row]
    chained = all(guess.parent == guess.row - 1 for guess in event.rejected if guess.row)
    return not chained or rows != list(range(1, len(rows) + 1))


def trees(rounds: Sequence[Round]) -> Iterator[Tree]:
    """Trees of the rounds of an answer whose guesses branch, each with its number; the prompt's own pass is 0.

    The first also says what the signs mean.
    """
    key = f" ({KEPT} kept, {LOST} not kept, {SKIPPED} not looked at)"
    for number, event in enumerate(rounds):
        if branches(event):
            facts = event.facts
            head = f"round {number}: {facts.accepted_count} of {facts.draft_count} guesses kept"
            yield _tree(event, head + key)
            key = ""


def _tree(event: Round, head: str) -> Tree:
    facts, last = event.facts, _last_row(event)
    lost = {guess.row for guess in event.rejected}
    # Where the last guess that was kept ended the answer, nothing after it was looked at.
    ended = facts.evaluated_count == facts.accepted_count
    drawn = Tree(Text(head, "dim"), guide_style="dim")
    rows, above = {0: drawn}, 0
    guesses: list[tuple[int, int, Text]] = []
    for token in event.tokens:
        if token.row:
            guesses.append((token.row, above, _label(KEPT, token, STYLES[Origin.ACCEPTED])))
            above = token.row
    for guess in event.rejected:
        skipped = guess.parent in lost or (ended and guess.parent == last)
        label = _label(SKIPPED, guess, "dim") if skipped else _label(LOST, guess, REJECTED_STYLE)
        guesses.append((guess.row, guess.parent, label))
    for row, parent, label in sorted(guesses, key=lambda each: each[0]):
        # Tokens that were kept after a stop string are not reported; what hung on them hangs on the last that is.
        rows[row] = rows[parent if parent in rows else last].add(label)
    for token in event.tokens:
        if not token.row:
            rows[last].add(_label(" ", token, STYLES[token.origin]))
    return drawn


def _label(sign: str, token: GeneratedToken | RejectedToken, style: str) -> Text:
    """A token with its drafter and, where that is reported, the estimate that it would be kept."""
    source = token.drafter or "draft"
    if isinstance(token, GeneratedToken) and not token.row:
        source = "target"
    elif token.value is not None:
        source += f" {token.value:.2f}"
    return Text.assemble(f"{sign} ", (repr(token.text.translate(CONTROL_PICTURES)), style), (f"  {source}", "dim"))


def _last_row(event: Round) -> int:
    return max((token.row for token in event.tokens), default=0)
