"""A stack whose target says prepared answers, token by token, through the whole protocol, with a draft that errs.

Its chat template is one in the manner of Qwen: tools in the system's turn, calls between marks, reasoning before.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.services.markov import EOS, MarkovModel
from support.services.markov_services import DraftServicer, TargetServicer, serving
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.server import RunningGateway, start
from gateway.settings import GatewaySettings
from outrider.grammar import ENGINE
from outrider.model_files.vocabulary import Vocabulary
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

END, TURN = "<|end|>", "<|turn|>"
TEMPLATE = """
{%- if tools %}<|turn|>system
You may call {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }} with <tool_call></tool_call>.
{% endif %}
{%- for message in messages %}<|turn|>{{ message.role }}
    {%- if message.reasoning_content is defined %}
        {{- '\\n<think>\\n' ~ message.reasoning_content ~ '\\n</think>' }}
    {%- endif %}
    {{- '\\n' ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>' }}
    {%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant
{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# What the prompt may have of the assistant's turn, the longest first.
HEADS = ("assistant\n<think>\n\n</think>\n\n", "assistant\n")

Script = Callable[[str], str]


def marked_tokenizer(special: Sequence[str], texts: Iterable[str] = (), added: Sequence[str] = ADDED) -> Tokenizer:
    """A tokenizer of bytes, and of what is frequent in some texts, with special tokens, the first of which is 0 and
    ends answers, and with added tokens that are not special, by default those of the Qwen models.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return tokenizer


class Reciter(MarkovModel):
    """Says what a script has for the prompt; one that errs is wrong now and then."""

    def __init__(
        self, tokenizer: Tokenizer, script: Script, turn: str, heads: Sequence[str], *, errs: bool = False
    ) -> None:
        super().__init__()
        self._tokenizer, self._script, self._heads, self._errs = tokenizer, script, heads, errs
        self._turn_id: int = tokenizer.token_to_id(turn)

    def draw(self, prefix: Sequence[int], seed: int) -> int:
        """The next token of the answer to what is before the last turn, which is the assistant's."""
        start = len(prefix) - 1 - list(reversed(prefix)).index(self._turn_id)
        # The turn's own words are in the prompt.
        turn = self._tokenizer.decode(prefix[start + 1 :], skip_special_tokens=False)
        prompt = self._tokenizer.decode(prefix[: start + 1], skip_special_tokens=False)
        head = next(each for each in self._heads if turn.startswith(each))
        head_len = len(self._tokenizer.encode(head, add_special_tokens=False).ids)
        answer = self._tokenizer.encode(self._script(prompt + head), add_special_tokens=False).ids
        place = len(prefix) - start - 1 - head_len
        if self._errs and place % 5 == 3:
            return (answer[0] + 1) % self._tokenizer.get_vocab_size()
        return answer[place] if place < len(answer) else EOS

    def logprob(self, last: int, token_id: int) -> float:
        """It says nothing else."""
        return 0.0


@dataclass(frozen=True)
class RecitingStack:
    """A running gateway, plain HTTP to it, and its gRPC service."""

    gateway: RunningGateway
    http: httpx.AsyncClient
    stub: GenerationServiceStub
    target: TargetServicer

    @property
    def base_url(self) -> str:
        """What clients of OpenAI's protocol are given."""
        return f"http://{self.gateway.rest_address}/v1"


@asynccontextmanager
async def reciting_stack(
    folder: Path,
    script: Script,
    answers: Iterable[str],
    *,
    template: str = TEMPLATE,
    context_len: int = 4096,
    special: Sequence[str] = (),
    added: Sequence[str] = ADDED,
    turn: str = TURN,
    heads: Sequence[str] = HEADS,
    **settings: object,
) -> AsyncIterator[RecitingStack]:
    """Target, draft and gateway on free ports; the script has an answer for a prompt, and is one of `answers`.

    `special` are tokens of the model beside its own two, of which `turn` opens turns; the assistant's begins with one
    of `heads`.
    """
    tokenizer = marked_tokenizer((END, turn, *special), [*answers, template] * 3, added)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(template)
    digests, size = Vocabulary.read(str(folder)).digests, tokenizer.get_vocab_size()
    shape = {"vocabulary_size": size, "context_len": context_len, "block_count": context_len // 4}
    reciter = Reciter(tokenizer, script, turn, heads)
    # It says what it says; what is stated here lets the gateway ask for calls.
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, reciter, digests, grammar_engine=ENGINE, **shape)
    erring = Reciter(tokenizer, script, turn, heads, errs=True)
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, erring, digests, **shape)
    async with serving(target) as target_address, serving(draft) as draft_address:
        options = {"listen": "127.0.0.1:0", "rest_listen": "127.0.0.1:0", **settings}
        gateway = await start(GatewaySettings(target_address, str(folder), draft_address, **options))  # type: ignore[arg-type]
        try:
            url = f"http://{gateway.rest_address}"
            async with open_channel(gateway.address) as channel, httpx.AsyncClient(base_url=url, timeout=60) as http:
                yield RecitingStack(gateway, http, GenerationServiceStub(channel), target)
        finally:
            await gateway.stop(0)
