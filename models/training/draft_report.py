"""Acceptance of the guesses of finished drafts: by the kind of task, the depth of the guess and the temperature.

The target answers each question at each temperature. A guess is measured at every token of the answers, given that all
guesses before it were right: at temperature 0 whether it is the target's token, else sum min(p, q), how often the ratio
rule keeps it (Leviathan et al., 2023, arXiv 2211.17192), both distributions at the temperature.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.errors import InvalidRequest
from training.decoding import BatchDecoder
from training.dialogue import Text, Writing
from training.heads import Eagle3
from training.material import seeded, write_shard
from training.steady import SteadyConsole
from training.storage import Storage
from training.stored import StoredTeacher

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTHS = 5
OWN = "its own texts"
OWN_TEXTS, QUESTIONS_EACH, ANSWER_LEN, MAX_QUESTION_LEN, TOGETHER = 12, 3, 128, 1200, 24
PARTS = "report-parts"
Report = dict[str, list[float]]
"""Acceptance by "temperature / category": for the head by the depth of the guess, for the draft that of any."""


class Question(NamedTuple):
    """A question that a user might ask."""

    category: str
    text: str


def read_questions(path: Path) -> list[Question]:
    """First turns of the first QUESTIONS_EACH of each category, of a file of JSON lines with `category` and `turns`.

    Raises InvalidRequest about `--questions`.
    """
    found: dict[str, list[Question]] = defaultdict(list)
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[entry["category"]].append(Question(entry["category"], entry["turns"][0]))
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        limit = f"a file of JSON lines with category and turns: {error!r}"
        raise InvalidRequest("--questions", str(path), limit) from error
    return [question for each in found.values() for question in each[:QUESTIONS_EACH]]


class Begun(NamedTuple):
    """A text that is to be written and measured."""

    category: str
    temperature: float
    given: Sequence[int]
    asks: bool
    """Whether the user's message is still to be written."""


def measure_drafts(
    writing: Writing,
    questions: Sequence[Question],
    decoder: BatchDecoder,
    teacher: StoredTeacher,
    head: Eagle3,
    draft: LlamaForCausalLM,
    storage: Storage,
    console: SteadyConsole,
) -> Report:
    """Runs the target over questions and over beginnings of its own, and both drafts over what it answers.

    What some of the texts showed is kept in the storage, for a run that is stopped before the last.
    """
    turns, limit = writing.turns, min(MAX_QUESTION_LEN, decoder.context_len - ANSWER_LEN)
    begun: list[Begun] = []
    for temperature in TEMPERATURES:
        given = writing.bos if turns is None else turns.before_user
        begun += [Begun(OWN, temperature, given, turns is not None)] * OWN_TEXTS
        for question in questions:
            ids = writing.tokenizer.encode(question.text, add_special_tokens=False)
            asked = ids if turns is None else turns.ask(ids)
            if len(asked) <= limit:
                begun.append(Begun(question.category, temperature, asked, False))
    begun.sort(key=lambda each: len(each.given))
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(DEPTHS + 2, dtype=torch.float64))
    generator = seeded("report")
    found = storage.result(PARTS)
    if found is not None:
        sums.update(found["sums"])
        generator.set_state(found["generator"])
    for start in range(0 if found is None else found["done"], len(begun), TOGETHER):
        some = begun[start : start + TOGETHER]
        texts = [Text(each.given, each.temperature, turns, user_writes=each.asks) for each in some]
        # A text that begins with its user's message needs room for that, too.
        longest = max(len(each.given) + ANSWER_LEN * (2 if each.asks else 1) for each in some)
        length = min(longest, decoder.context_len)
        name = f"report: texts {start + 1:,} to {start + len(some):,} of {len(begun):,}"

        def report(token: int, name: str = name, length: int = length) -> None:
            console.doing = f"{name}, token {token:,} of {length:,}"

        written = write_shard(decoder, texts, length, generator, report)
        is_measured = first_answers(written["is_answer"])
        for row, each in enumerate(some):
            picked = {name: tensor[row : row + 1] for name, tensor in written.items()}
            values = _kept(picked, is_measured[row : row + 1], each.temperature, decoder, teacher, head, draft)
            sums[f"{each.temperature:g} / {each.category}"] += values
        kept = {"done": start + TOGETHER, "sums": dict(sums), "generator": generator.get_state()}
        storage.save_result(PARTS, kept)
        console.print(f"report: {start + len(some):,} of {len(begun):,} texts")
    return {name: (each[:-1] / each[-1].clamp_min(1)).tolist() for name, each in sums.items()}


def first_answers(is_answer: Tensor) -> Tensor:
    """[B, L]: the first unbroken run of each text's answers alone."""
    ended = (is_answer[:, :-1] & ~is_answer[:, 1:]).cumsum(-1) > 0
    kept = is_answer.clone()
    kept[:, 1:] &= ~ended
    return kept


@torch.inference_mode()
def _kept(
    written: Mapping[str, Tensor],
    is_measured: Tensor,
    temperature: float,
    decoder: BatchDecoder,
    teacher: StoredTeacher,
    head: Eagle3,
    draft: LlamaForCausalLM,
) -> Tensor:
    """Sums of what is kept of one text: of the head's guesses by depth, of the draft's; and how many were measured."""
    head.steps_ahead = DEPTHS
    columns = is_measured[0, DEPTHS + 1 :].nonzero()[:, 0] + DEPTHS  # of the rows whose distributions are measured
    laws = decoder.logits(written["normed"][0, columns]).float()
    with torch.autocast("cpu", torch.bfloat16):
        steps = head.normed_states(written["taps"].float(), written["token_ids"])
        guesses = [head.lm_head(states[0, columns - 1 - step]).float() for step, states in enumerate(steps)]
        states = draft.model(input_ids=written["token_ids"], use_cache=False).last_hidden_state
        drafted = draft.lm_head(states[0, columns]).float()
    kept = [kept_of(laws, guess, teacher.draft_ids, temperature) for guess in guesses]
    kept.append(kept_of(laws, drafted, torch.arange(laws.shape[1]), temperature))
    return torch.tensor([*kept, len(columns)], dtype=torch.float64)


def kept_of(laws: Tensor, guessed: Tensor, ids: Tensor, temperature: float) -> float:
    """Sum over rows of sum min(p, q), or at temperature 0 of likeliest ids that agree; guesses [n, V'] are of `ids`."""
    if temperature == 0:
        return float((ids[guessed.argmax(-1)] == laws.argmax(-1)).sum())
    wanted = (laws / temperature).softmax(-1)[:, ids]
    return float(torch.minimum(wanted, (guessed / temperature).softmax(-1)).sum())


def tokens_a_round(kept: Sequence[float]) -> float:
    """Mean tokens of a round with a guess of each depth, chances taken as independent; the target's own included."""
    total = chance = 1.0
    for each in kept:
        chance *= each
        total += chance
    return total


def markdown(report: Mapping[str, Sequence[float]]) -> str:
    """One table for each temperature: the head by depth, its tokens a round, and the separate draft."""
    lines: list[str] = []
    for temperature in TEMPERATURES:
        depths = " | ".join(f"depth {depth + 1}" for depth in range(DEPTHS))
        columns = f"| task | {depths} | head, tokens a round | draft, any depth | draft, tokens a round |"
        lines += [f"### Temperature {temperature:g}", "", columns]
        lines.append("|---" * (DEPTHS + 4) + "|")
        rows = {name.split(" / ")[1]: each for name, each in report.items() if name.startswith(f"{temperature:g} / ")}
        mean = [sum(column) / len(column) for column in zip(*rows.values(), strict=True)]
        for name, (*head, draft) in {**rows, "mean of the tasks": mean}.items():
            shown = " | ".join(f"{each:.3f}" for each in head)
            rounds = tokens_a_round(head), tokens_a_round([draft] * DEPTHS)
            lines.append(f"| {name} | {shown} | {rounds[0]:.2f} | {draft:.3f} | {rounds[1]:.2f} |")
        lines.append("")
    return "\n".join(lines)
