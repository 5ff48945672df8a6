"""One decision for many sessions: each gets what its rule gives it alone, and a fault is one session's own."""

import math
from dataclasses import replace

import pytest
from support.basics import spec_of
from support.drafting.rules import RULES_WITH_LAWS, continued, drafted, logits_behind, ruled
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.walk import Walk
from outrider.errors import OutriderError
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree
from target_service.acceptance import decide

SAMPLED = spec_of(PROMPT, 60, seed=5, eos=(), temperature=0.9)
GREEDY = spec_of(PROMPT, 60, seed=5, eos=())
WORDY = spec_of(PROMPT, 60, seed=9, eos=(3,), temperature=1.2, top_k=40, top_p=0.9, min_tokens=4, frequency_penalty=0.7)

Wish = tuple[SessionSpec, TokenTree]


def decided(runner: ModelRunner, wishes: list[Wish], bad: dict[int, int] | None = None) -> list[Walk | OutriderError]:
    """The walks of one forward; `bad` names a row of an input that has no logits."""
    inputs = [DrawInput(Feed(runner.open(spec.token_ids, spec.prompt_len), tree), spec) for spec, tree in wishes]
    result = runner.forward([draw_input.feed for draw_input in inputs])
    ranges = [rows for rows in result.ranges if rows is not None]
    assert len(ranges) == len(inputs)
    for number, row in (bad or {}).items():
        result.logits[ranges[number].start + row] = math.nan
    walks = decide(runner, inputs, result.logits, ranges)
    for draw_input in inputs:
        draw_input.feed.session.free()
    return walks


def tokens_of(tree: TokenTree, walk: Walk | OutriderError) -> list[int]:
    """What a walk commits."""
    assert isinstance(walk, Walk), walk
    return [*(tree.token_ids[row - 1] for row in walk.accepted_rows), walk.next_token_id]


def wishes_of(runner: ModelRunner, count: int) -> list[Wish]:
    """Requests of all rules, temperatures and lengths of proposals."""
    wishes = []
    for number in range(count):
        rule = tuple(Rule)[number % 5]
        base = (SAMPLED, WORDY, GREEDY)[number % 3]
        spec = replace(ruled(base, rule), token_ids=(*PROMPT, number), seed=number)
        draft_count = (4, 2, 0, 4)[number % 4]
        wishes.append((spec, drafted(runner, spec, draft_count) if draft_count else EMPTY))
    return wishes


@pytest.mark.parametrize("rule", Rule)
def test_sixteen_sessions_of_one_rule_decide_as_if_alone(runner: ModelRunner, rule: Rule) -> None:
    """The same tokens and counts, in any order."""
    specs = [replace(ruled(SAMPLED, rule), token_ids=(*PROMPT, number), seed=number) for number in range(16)]
    wishes = [(spec, drafted(runner, spec, 4)) for spec in specs]
    alone = [decided(runner, [wish])[0] for wish in wishes]
    assert decided(runner, wishes) == alone
    assert decided(runner, wishes[::-1]) == alone[::-1]
    lengths = {len(walk.accepted_rows) for walk in alone if isinstance(walk, Walk)}
    assert len(lengths) > 1


def test_sessions_of_all_kinds_decide_as_if_alone(runner: ModelRunner) -> None:
    """Rules, temperatures, cuts, penalties, and proposals of several lengths and of none."""
    wishes = wishes_of(runner, 20)
    alone = [decided(runner, [wish])[0] for wish in wishes]
    assert decided(runner, wishes) == alone
    assert decided(runner, wishes[7:] + wishes[:7]) == alone[7:] + alone[:7]


@pytest.mark.parametrize("spec", [SAMPLED, GREEDY, WORDY])
@pytest.mark.parametrize("rule", Rule)
def test_an_empty_proposal_is_plain_decoding(runner: ModelRunner, rule: Rule, spec: SessionSpec) -> None:
    """Under every rule the token is that of `match`."""
    assert decided(runner, [(ruled(spec, rule), EMPTY)]) == decided(runner, [(spec, EMPTY)])


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_temperature_0_is_greedy(runner: ModelRunner, rule: Rule) -> None:
    """Whatever distribution is sent: one that is right, one that is often wrong, and one with many tokens."""
    for seed in range(10):
        spec = replace(GREEDY, token_ids=(*PROMPT, seed), seed=seed)
        for noise in (0.0, 3.0):
            tree = drafted(runner, ruled(spec, rule), 4, noise)
            assert decided(runner, [(ruled(spec, rule), tree)]) == decided(
                runner, [(spec, TokenTree.chain(tree.token_ids))]
            )
        broad = drafted(runner, ruled(replace(SAMPLED, token_ids=spec.token_ids), rule), 4)
        assert decided(runner, [(ruled(spec, rule), broad)]) == decided(
            runner, [(spec, TokenTree.chain(broad.token_ids))]
        )


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_counts_tell_what_was_tested(runner: ModelRunner, rule: Rule) -> None:
    """Of a chain the kept tokens and the first that was not; all of it when all are kept."""
    for number in range(12):
        spec = replace(ruled(SAMPLED, rule), token_ids=(*PROMPT, number), seed=number)
        [walk] = decided(runner, [(spec, drafted(runner, spec, 3))])
        assert isinstance(walk, Walk)
        assert walk.accepted_rows == tuple(range(1, len(walk.accepted_rows) + 1))
        assert walk.evaluated_count == min(len(walk.accepted_rows) + 1, 3)


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
@pytest.mark.parametrize("bad_row", [1, 2, 3])
def test_a_row_without_a_draw_is_not_entered(runner: ModelRunner, rule: Rule, bad_row: int) -> None:
    """Its token is committed when the walk gets there, and nothing after it; the tokens before it are the same."""
    for number in range(12):
        spec = replace(ruled(SAMPLED, rule), token_ids=(*PROMPT, number), seed=number)
        tree = drafted(runner, spec, 3, noise=0.1)
        other = (replace(SAMPLED, seed=number), EMPTY)
        right = decided(runner, [(spec, tree), other])
        found = decided(runner, [(spec, tree), other], {0: bad_row})
        assert found[1] == right[1]
        assert isinstance(found[0], Walk)
        committed = tokens_of(tree, found[0])
        assert len(committed) <= bad_row
        if len(committed) == bad_row and found[0].evaluated_count == bad_row == len(found[0].accepted_rows) + 1:
            assert committed[:-1] == list(tree.token_ids[: bad_row - 1])


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_chain_is_cut_behind_the_token_whose_row_is_bad(runner: ModelRunner, rule: Rule) -> None:
    """A draft that says what the target says is kept up to that token, with nothing drawn after it."""
    spec = ruled(SAMPLED, rule)
    tree = drafted(runner, spec, 3, noise=0.0, top_n=VOCABULARY_SIZE - 1)
    [walk] = decided(runner, [(spec, tree)], {0: 2})
    assert walk == Walk((1,), tree.token_ids[1], 2)


@pytest.mark.parametrize("rule", Rule)
def test_a_root_without_a_draw_fails_alone(runner: ModelRunner, rule: Rule) -> None:
    """The error names the length; the sessions beside it are decided as ever."""
    specs = [replace(ruled(SAMPLED, rule), seed=seed) for seed in range(3)]
    wishes = [(spec, drafted(runner, spec, 2)) for spec in specs]
    right = decided(runner, wishes)
    found = decided(runner, wishes, {1: 0})
    assert [found[0], found[2]] == [right[0], right[2]]
    assert isinstance(found[1], OutriderError)
    assert "behind 5 tokens, so no token can be drawn" in str(found[1])


def test_lenience_keeps_what_ratio_does_not(runner: ModelRunner) -> None:
    """More of the same chains, and at temperature 0 tokens that are not the best."""
    kept = dict.fromkeys((1.0, 0.1), 0)
    for lenience in kept:
        for number in range(16):
            for base in (SAMPLED, GREEDY):
                spec = replace(base, token_ids=(*PROMPT, number), seed=number)
                tree = drafted(runner, ruled(spec, Rule.RATIO), 4, noise=1.5)
                [walk] = decided(runner, [(ruled(spec, Rule.LENIENT, lenience=lenience), tree)])
                kept[lenience] += len(tokens_of(tree, walk)) - 1
    assert kept[0.1] > kept[1.0] + 10


def test_lenience_at_temperature_0_looks_at_the_edited_row(runner: ModelRunner) -> None:
    """A bias decides what is near the best token; temperature 0 and cuts do not."""
    spec = ruled(replace(GREEDY, token_ids=PROMPT), Rule.LENIENT, lenience=0.5)
    probs = runner.ops.softmax(logits_behind(runner, list(PROMPT)))[0]
    best, rival = probs.argsort(descending=True)[[0, 40]].tolist()
    distribution = drafted(runner, spec, 1).distributions[0]
    tree = TokenTree.chain([rival], [replace(distribution, token_ids=(rival,))])
    assert decided(runner, [(spec, tree)]) == [Walk((), best, 1)]
    lift = math.log(float(probs[best] / probs[rival]) * 0.6)
    lifted = replace(spec, sampling=spec.sampling.model_copy(update={"logit_bias": {rival: lift}, "top_k": 1}))
    [walk] = decided(runner, [(lifted, tree)])
    assert isinstance(walk, Walk)
    assert walk.accepted_rows == (1,)


def test_typical_takes_a_likely_token_instead_of_its_own(runner: ModelRunner) -> None:
    """Not the target's draw, but above the threshold; one that is not above it is no more than under `match`."""
    spec = replace(SAMPLED, token_ids=PROMPT)
    [plain] = decided(runner, [(spec, EMPTY)])
    assert isinstance(plain, Walk)
    probs = runner.ops.softmax(logits_behind(runner, list(PROMPT)) / 0.9)[0]
    rivals = [token for token in probs.argsort(descending=True).tolist() if token != plain.next_token_id][:2]
    tree = TokenTree((rivals[1], rivals[0]), (0, 0))
    easy = {"typical_epsilon": float(probs[rivals[1]]) * 0.9, "typical_delta": 1.0}
    [walk] = decided(runner, [(ruled(spec, Rule.TYPICAL, **easy), tree)])
    assert isinstance(walk, Walk)
    assert (walk.accepted_rows, walk.evaluated_count) == ((2,), 1)
    behind = decided(runner, [(continued(spec, [rivals[0]]), EMPTY)])
    assert isinstance(behind[0], Walk)
    assert walk.next_token_id == behind[0].next_token_id
    unlikely = TokenTree(tuple(probs.argsort()[:2].tolist()), (0, 0))
    assert decided(runner, [(ruled(spec, Rule.TYPICAL), unlikely)]) == decided(runner, [(spec, unlikely)])
    own = TokenTree((rivals[0], plain.next_token_id), (0, 0))
    [walk] = decided(runner, [(ruled(spec, Rule.TYPICAL, **easy), own)])
    assert isinstance(walk, Walk)
    assert walk.accepted_rows == (2,)


def test_typical_at_temperature_0_looks_at_the_row_before_it_collapses(runner: ModelRunner) -> None:
    """A token that is not the best is typical where epsilon lets it be; afterwards it no longer had a probability."""
    spec = replace(GREEDY, token_ids=PROMPT)
    rival = logits_behind(runner, list(PROMPT))[0].argsort(descending=True)[-1].item()
    tree = TokenTree((int(rival),), (0,))
    [easy] = decided(runner, [(ruled(spec, Rule.TYPICAL, typical_epsilon=1e-12), tree)])
    [strict] = decided(runner, [(ruled(spec, Rule.TYPICAL), tree)])
    assert isinstance(easy, Walk)
    assert isinstance(strict, Walk)
    assert (easy.accepted_rows, strict.accepted_rows) == ((1,), ())


def test_a_session_is_decided_by_its_own_noise(runner: ModelRunner) -> None:
    """Other seeds decide otherwise about the same chain."""
    spec = ruled(SAMPLED, Rule.RATIO)
    tree = drafted(runner, spec, 4, noise=1.0)
    walks = {seed: decided(runner, [(replace(spec, seed=seed), tree)])[0] for seed in range(30)}
    assert len(set(walks.values())) > 10
