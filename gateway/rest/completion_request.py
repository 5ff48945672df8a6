"""The body of POST /v1/completions. Knows no generation."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from gateway.rest.fields import GenerationFields, Unserved
from outrider.parameters import MAX_LOGPROB_COUNT, MAX_SAMPLES, TokenId

MAX_PROMPTS, MAX_IDS = 64, 1_000_000
PROMPT_KINDS = (
    "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty"
)

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS, fail_fast=True)]


def _prompt_kind(value: object) -> str | None:
    """A list is of the kind of its first entry, so that only one kind is tried on all of them."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    return {str: "<texts>", int: "<ids>", list: "<id lists>"}.get(type(value[0]))


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[Ids, Tag("<ids>")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<id lists>")],
    Discriminator(_prompt_kind, custom_error_type="prompt_kind", custom_error_message=PROMPT_KINDS),
]


class CompletionRequest(GenerationFields):
    """A prompt, or several, and how to go on."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROB_COUNT)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES, description="Must equal n.")] | None = None
    suffix: Unserved = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts one by one."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        many = [each for each in prompt if not isinstance(each, int)]
        return many or [[each for each in prompt if isinstance(each, int)]]
