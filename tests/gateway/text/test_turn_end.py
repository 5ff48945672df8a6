"""Which token closes an assistant's turn by templates in the manner of many models, and the faults of others."""

import re

import pytest
from support.models.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL
from support.services.reciting import TEMPLATE, marked_tokenizer

from gateway.text.chat_template import ChatTemplate, TemplateFiles
from gateway.text.tokenizer import Tokenizer
from gateway.text.turn_end import TurnEnd, turn_end

NAMES = ("</s>", "<s>", "<|turn|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "[INST]", "<|user|>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One with tokens of all these models."""
    folder = tmp_path_factory.mktemp("marked")
    marked_tokenizer(NAMES).save(str(folder / "tokenizer.json"))
    return Tokenizer(str(folder))


def closing(template: str, tokenizer: Tokenizer, special: dict[str, str] | None = None) -> TurnEnd:
    """What is found out about a template."""
    return turn_end(
        ChatTemplate(TemplateFiles({"default": template}, SPECIAL if special is None else special)), tokenizer
    )


EACH = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
OPEN_LAST = "<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}"
PAIRS = "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %} {{ m.content }}{% endif %}"
ROLES = "<|{{ m.role }}|>\n{{ m.content }}"
TAGGED = "{% if m.role == 'user' %}Q: {{ m.content }}\n{% else %}<a>{{ m.content }}</a>\n{{ eos_token }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (MISTRAL, "</s>"),
        (GEMMA, "<end_of_turn>"),
        (EACH % ("{{ m.content }}{{ eos_token }}", ""), "</s>"),
        (EACH % (TAGGED, "<a>"), "</s>"),
        (EACH % (OPEN_LAST, "<|im_start|>assistant\n"), "<|im_end|>"),
        (EACH % (PAIRS, ""), "[INST]"),
        (EACH % (ROLES, "<|assistant|>\n"), "<|user|>"),
    ],
)
def test_a_turn_is_closed_by_a_token(template: str, name: str, tokenizer: Tokenizer) -> None:
    """At the end of a conversation, or within it where the last turn stays open, and then by what opens another's."""
    assert closing(template, tokenizer) == TurnEnd(tokenizer.added_tokens[name])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            EACH % ("### {{ m.role }}: {{ m.content }}\n", "### assistant:"),
            r"with '### user: Who\?', which is no token",
        ),
        (
            EACH % ("{{ m.content }}<|end_of_answer|>\n", ""),
            r"with '<\|end_of_answer\|>', which is no token of its own",
        ),
        # The model may go on with a turn of its own.
        (TEMPLATE, "which is no token of its own"),
        (EACH % ("{{ bos_token }}{{ m.content }}", "{{ bos_token }}"), "which is no token of its own"),
        ("{{ messages[0].content }}", "with nothing"),
        ("{{ raise_exception('Only tools speak here.') }}", "does not render a plain conversation: .*Only tools"),
    ],
)
def test_a_turn_that_no_token_closes_is_a_fault(template: str, words: str, tokenizer: Tokenizer) -> None:
    """Also where a template was put beside a tokenizer that lacks its tokens."""
    found = closing(template, tokenizer)
    assert found.token_id is None
    assert re.search(words, found.fault), found.fault


def test_one_token_may_begin_and_end_texts(tokenizer: Tokenizer) -> None:
    """As GPT-2's does."""
    special = {"bos_token": "</s>", "eos_token": "</s>"}
    assert closing(EACH % ("{{ m.content }}{{ bos_token }}", ""), tokenizer, special).token_id == 0


def test_the_plain_template_closes_nothing(tokenizer: Tokenizer) -> None:
    """It is no model's: a base model without a template is no model at fault."""
    assert turn_end(ChatTemplate(), tokenizer) == TurnEnd()
