"""What a proposal costs a draft alone, and one that verifies a cheaper guess: milliseconds and forwards. No gate.

    python -m bench.cascade [--draft models/draft] [--cascade lookup] [--counts 4,8] [--texts 8] [--temperature 0]

Texts are known beforehand: stories that the embedded target has written, and one of their sentences said again and
again. Every round both drafts propose K tokens, in turns, after the same tokens, and the text says how many of them
were right and what comes next. The cascade `useless` always guesses wrongly, and shows what that costs. Proposals must
be the same, bit for bit.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import tokenizers
import torch

from bench.common import OPENINGS, TokensDiffer, machine, markdown, revision, rotated, spec_of, spread
from outrider.drafters.model_drafter import COUPLED, DraftTask, Guess, ModelDrafter, noise_of
from outrider.drafters.shelf.cascade import Cascade, CheaperDraft, TextDraft, model_cascade, text_cascade
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.errors import OutriderError
from outrider.model_names import embedded_model
from outrider.model_service.settings import check_cascade, split_cascade
from outrider.parameters import Rule, SessionSpec
from outrider.timing import Meter
from outrider.token_tree import TokenTree

TOKENS, SENTENCE, REPETITIONS = 160, 24, 8
ALONE, USELESS = "alone", "useless"
STORY, REPEATED = "story", "repeated"


class UselessDraft(TextDraft):
    """Has a guess for everything, and none is right."""

    def look(self, outer: DraftTask, count: int) -> int:
        TextDraft.look(self, outer, count)
        self.kind = 1
        return self.kind

    def begin(self, outer: DraftTask, count: int, *, is_final: bool = False) -> None:
        self.guesses = [Guess(outer.session.token_ids[-1])] * count


@dataclass(eq=False)
class Variant:
    """A draft with its own cascade, and one session of it."""

    runner: ModelRunner
    cascade: Cascade | None
    drafter: ModelDrafter = field(init=False)
    cheaper: CheaperDraft | None = None
    base_len: int = 0

    def __post_init__(self) -> None:
        self.drafter = ModelDrafter(self.runner, lambda allocate: allocate(), ahead=self.cascade)

    def begin(self, spec: SessionSpec) -> None:
        """Opens the session, and reads its prompt."""
        self.spec, self.base_len = spec, spec.prompt_len
        self.session = self.runner.open(spec.token_ids, spec.prompt_len)
        self.cheaper = self.cascade.open(spec, None) if self.cascade is not None else None
        self.propose((), 2)

    def propose(self, new: Sequence[int], count: int) -> tuple[TokenTree, float, int]:
        """Commits tokens; returns the proposal after them, its milliseconds and its forwards. Raises OutriderError."""
        started_s = time.perf_counter()
        failed: list[OutriderError] = []
        self.session.replace_tail(self.base_len, new)
        self.base_len += len(new)
        noise = noise_of(COUPLED, Rule.MATCH)
        task = DraftTask(self.session, self.spec, noise, count, Meter(), lambda task: None, failed.append)
        task.inner = self.cheaper
        while not task.done:
            self.drafter.advance([task])
        for error in failed:
            raise error
        return task.proposal, 1e3 * (time.perf_counter() - started_s), task.meter.times().forward_count

    def end(self) -> None:
        self.session.free()
        if self.cheaper is not None:
            self.cheaper.free()


def texts(target: ModelRunner, count: int, temperature: float) -> Iterator[tuple[str, list[int], int]]:
    """Kind, tokens and length of the prompt of each text."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{embedded_model('target')}/tokenizer.json")
    for number, opening in enumerate(OPENINGS[:count]):
        prompt = tokenizer.encode(opening).ids
        spec = spec_of(prompt, number, temperature, TOKENS)
        session = target.open(prompt, len(prompt))
        while len(session) < len(prompt) + TOKENS:
            [drawn] = forward_and_draw(target, [DrawInput(Feed(session), spec)])
            if isinstance(drawn, OutriderError):
                raise drawn
            session.extend(drawn or ())
        session.free()
        yield STORY, session.token_ids, len(prompt)
        sentence = session.token_ids[len(prompt) : len(prompt) + SENTENCE]
        yield REPEATED, [*prompt, *sentence * REPETITIONS], len(prompt) + 2 * SENTENCE


Found = dict[tuple[str, str], tuple[list[float], list[int]]]
"""Milliseconds and forwards of every proposal, by kind of text and variant."""


def measure(
    variants: dict[str, Variant], kind: str, tokens: Sequence[int], spec: SessionSpec, draft_count: int, found: Found
) -> None:
    """Measures one text, round by round; raises TokensDiffer."""
    for variant in variants.values():
        variant.begin(spec)
    base_len, turn = spec.prompt_len, 0
    new: Sequence[int] = ()
    while base_len + draft_count + 1 < len(tokens):
        proposals = {}
        for name in rotated(list(variants), turn):
            proposals[name], taken_ms, num_forwards = variants[name].propose(new, draft_count)
            times, counts = found.setdefault((kind, name), ([], []))
            times.append(taken_ms)
            counts.append(num_forwards)
        if any(one != other for one, other in pairwise(proposals.values())):
            raise TokensDiffer(f"{kind}, K = {draft_count}, behind {base_len} tokens: {proposals}")
        [proposal, *_] = proposals.values()
        right = 0
        while right < len(proposal) and proposal.token_ids[right] == tokens[base_len + right]:
            right += 1
        new = tokens[base_len : base_len + right + 1]
        base_len, turn = base_len + len(new), turn + 1
    for variant in variants.values():
        variant.end()


def cascades(name: str, dtype: str, num_threads: int) -> Cascade:
    """The cascade of a name, as the draft service has it; raises ModelRefused."""
    if name == USELESS:
        return Cascade(lambda _spec, _salt: UselessDraft())
    model, has_lookup = split_cascade(check_cascade(name, 0))
    if not model:
        return text_cascade()
    runner = ModelRunner.load(model, dtype=dtype, num_threads=num_threads)
    return model_cascade(runner, DEFAULT_TOP_N, with_text=has_lookup)


def main() -> None:
    """Prints a table of the measured proposals, a draft alone against one with a cascade."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draft", default=embedded_model("draft"), help="model of the draft")
    parser.add_argument("--cascade", nargs="+", default=["lookup", USELESS], help="what guesses for it, or useless")
    parser.add_argument("--counts", default="4,8", help="K, with commas between")
    parser.add_argument("--texts", type=int, default=8, help="texts of each kind")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the target and of the drafts")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights in memory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draft = ModelRunner.load(given.draft, dtype=given.dtype, num_threads=given.threads)
    target = ModelRunner.load(embedded_model("target"), dtype=given.dtype, num_threads=given.threads)
    known = list(texts(target, given.texts, given.temperature))
    rows = []
    for draft_count in map(int, given.counts.split(",")):
        found: Found = {}
        variants = {name: Variant(draft, cascades(name, given.dtype, given.threads)) for name in given.cascade}
        variants[ALONE] = Variant(draft, None)
        for number, (kind, tokens, prompt_len) in enumerate(known):
            spec = spec_of(tokens[:prompt_len], number // 2, given.temperature, len(tokens))
            measure(variants, kind, tokens, spec, draft_count, found)
        for (kind, name), (times, counts) in sorted(found.items()):
            alone, _ = found[kind, ALONE]
            ratio = spread(one / other for one, other in zip(times, alone, strict=True))
            mean_ratio = sum(times) / sum(alone)
            row = [str(draft_count), kind, name, spread(times).show(".3f"), f"{sum(counts) / len(counts):.2f}"]
            rows.append([*row, ratio.show(".3f"), f"{mean_ratio:.3f}", str(len(times))])
    print(f"{given.draft}, {given.dtype}, temperature {given.temperature:g}, {given.threads} threads; {machine()};")
    print(f"medians, in brackets quartiles, of all proposals; commit {revision() or 'unknown'}.\n")
    header = ("K", "text", "cascade", "ms a proposal", "forwards", "over alone", "of all time", "proposals")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
