"""What a target is made to write: whose turn it is, which tokens count as answers, and how texts begin."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidRequest
from training.dialogue import MAX_USER_TOKENS, OPENINGS, USER_TEMPERATURE, Text, Turns, Writing

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer(pair: Path, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """The tiny pair's tokenizer with a chat template, whose messages end with <|endoftext|>."""
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = template
    return made


# Its tokenizer is that of a model that is trained first.
pytestmark = pytest.mark.slow


@pytest.fixture(name="turns")
def found_turns(trained: tuple[Path, str]) -> Turns:
    turns = Turns.read(chat_tokenizer(trained[0]), frozenset({0}))
    assert turns is not None
    return turns


def test_a_template_becomes_the_ids_between_its_messages(trained: tuple[Path, str], turns: Turns) -> None:
    """Together with the messages they are what the template renders."""
    tokenizer = chat_tokenizer(trained[0])
    ids = turns.before_user, turns.before_answer, turns.between
    texts = ["[user]", "<|endoftext|>[assistant]", "<|endoftext|>[user]"]
    assert [tokenizer.decode(list(each)) for each in ids] == texts
    assert turns.ask([7, 8]) == [*turns.before_user, 7, 8, *turns.before_answer]


def test_the_target_writes_the_users_message_and_then_answers(turns: Turns) -> None:
    """After an empty user turn; only what it draws for an answer counts as one, the end of it included."""
    text = Text(turns.before_user, 0.3, turns, user_writes=True)
    given = [text.follow(99) for _ in turns.before_user]
    assert given == [(token_id, False) for token_id in turns.before_user]
    assert text.temperature == USER_TEMPERATURE
    assert [text.follow(each) for each in (50, 51)] == [(50, False), (51, False)]
    assert [text.follow(0), *(text.follow(99) for _ in turns.before_answer[1:])] == [
        (token_id, False) for token_id in turns.before_answer
    ]
    assert text.temperature == 0.3
    assert [text.follow(60), text.follow(0)] == [(60, True), (turns.between[0], True)]
    assert [text.follow(99) for _ in turns.between[1:]] == [(token_id, False) for token_id in turns.between[1:]]
    assert text.temperature == USER_TEMPERATURE


def test_a_message_without_an_end_is_ended(turns: Turns) -> None:
    """After MAX_USER_TOKENS the answer begins, whatever the target would go on to say."""
    text = Text((), 0.0, turns, user_writes=True)
    tokens = [text.follow(50)[0] for _ in range(MAX_USER_TOKENS + len(turns.before_answer))]
    assert tokens[MAX_USER_TOKENS - 1 : -1] == list(turns.before_answer)
    assert tokens[: MAX_USER_TOKENS - 1] == [50] * (MAX_USER_TOKENS - 1)
    assert text.follow(51) == (51, True)


def test_own_documents_are_asked_about(trained: tuple[Path, str], turns: Turns) -> None:
    """With a share of 1 every text is a request about a piece; with 0 none; without turns pieces are continued."""
    tokenizer = chat_tokenizer(trained[0])
    document = "\n".join(f"line {number} of the tale" for number in range(50))

    def begun(share: float, known: Turns | None) -> list[str]:
        writing = Writing(tokenizer, known, (0,), (0.0, 1.0), [document], share)
        texts = writing.texts(4, torch.Generator().manual_seed(1))
        assert [text.temperature for text in texts] == ([USER_TEMPERATURE] * 4 if not share else [0.0, 1.0] * 2)
        return [tokenizer.decode([text.follow(0)[0] for _ in range(8)]) for text in texts]

    assert all(text.startswith("[user]") and text != "[user]" for text in begun(1, turns))
    own = [text.removeprefix("[user]").split("<|endoftext|>")[0] for text in begun(0, turns)]
    assert all(any(opening.startswith(text) for opening in ("", *OPENINGS)) for text in own)
    assert all(text.startswith("<|endoftext|>line ") for text in begun(1, None))


def test_a_template_that_hides_messages_is_refused(trained: tuple[Path, str]) -> None:
    """One that shows the last message alone cannot show what stands between them; without a template there is none."""
    hiding = chat_tokenizer(trained[0], "{{ messages[-1]['content'] }}")
    with pytest.raises(InvalidRequest, match="chat template shows every message"):
        Turns.read(hiding, frozenset({0}))
    assert Turns.read(chat_tokenizer(trained[0], None), frozenset({0})) is None


def test_every_other_message_begins_as_users_begin(trained: tuple[Path, str], turns: Turns) -> None:
    """With the first words of some kind of task, from which the target goes on; the others are all its own."""
    tokenizer = chat_tokenizer(trained[0])
    texts = Writing(tokenizer, turns, (0,), (0.0,), [], 0.0).texts(1600, torch.Generator().manual_seed(1))
    begun: list[str] = []
    for text in texts:
        said = [text.follow(99) for _ in range(40)]
        ids = [token_id for token_id, is_answer in said if token_id != 99 and not is_answer]
        begun.append(tokenizer.decode(ids[len(turns.before_user) :]))
    assert set(begun) == {"", *OPENINGS}
    assert 700 <= begun.count("") <= 900
