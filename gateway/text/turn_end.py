"""The token with which a chat template closes what an assistant said: a model that learnt it ends its turns with it."""

from dataclasses import dataclass

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.errors import InvalidRequest, shown

QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Outrider"}


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The closing token, None where there is none, and then what is wrong with that, if anything is."""

    token_id: int | None = None
    fault: str = ""


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> TurnEnd:
    """Token that follows an answer at the end of a conversation, or within it where templates leave the last turn open.

    What opens the assistant's own turn there is no end, for a model may go on with it, and neither is the token with
    which texts begin. The plain template closes nothing, and is no model's.
    """
    if template.is_default:
        return TurnEnd()
    try:
        asked, opened, *answered = (
            template.render(messages, add_generation_prompt=adds).text
            for messages, adds in (
                ([QUESTION], False),
                ([QUESTION], True),
                ([QUESTION, ANSWER], False),
                ([QUESTION, ANSWER, QUESTION], False),
            )
        )
    except InvalidRequest as error:
        return TurnEnd(fault=f"the chat template does not render a plain conversation: {error}")
    special = template.files.special_tokens
    begins = special.get("bos_token", "") if special.get("bos_token") != special.get("eos_token") else ""
    tails = [text.rpartition(ANSWER["content"])[2].strip() for text in answered if ANSWER["content"] in text]
    for place, tail in enumerate(tails):
        # Runs of spaces are tokens of their own in some vocabularies.
        found = [(tail.find(name), -len(name), name) for name in tokenizer.added_tokens if name.strip()]
        start, _, name = min((each for each in found if each[0] >= 0), default=(0, 0, ""))
        if name and name != begins and name not in opened.removeprefix(asked) and (place == 0 or start == 0):
            return TurnEnd(tokenizer.added_tokens[name])
    said = next(filter(None, tails), "")
    closing = f"with {shown(said)}, which is no token of its own" if said else "with nothing"
    return TurnEnd(fault=f"the chat template closes an assistant's turn {closing}")
