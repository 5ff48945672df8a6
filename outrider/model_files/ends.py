"""Tokens that end an answer by what a model's files say, all of them together, and where each is said.

A model that ends its turns with a token that one file forgets would go on with the user's part, so no file overrules
another: what any of them names ends an answer. Besides them speaks the name of a token. The names are those by which
llama.cpp knows what ends a generation (src/llama-vocab.cpp, special_eog_ids), but for its tokens between files and
around gaps, and those of further families in all their brackets.
"""

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from outrider.errors import ModelRefused
from outrider.model_files.gguf.config import ENDS
from outrider.model_files.gguf.files import gguf_in
from outrider.model_files.gguf.header import GgufFile

IDS_IN = ("generation_config.json", "config.json")
NAMES_IN = ("tokenizer_config.json", "special_tokens_map.json")
ITS_NAME = "its name"
NAMED = frozenset({"<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>"})
# <|im_end|>, <|eot_id|>, <end_of_turn>, <|END_OF_TURN_TOKEN|>, [|endofturn|], _<EOT>, DeepSeek's with its wide bars and
# low blocks, and others.
GAP, BAR = r"[_\u2581]?", r"[|\uff5c]?"
WORDS = rf"im_end|eo[smt]|eo[mt]_id|end{GAP}of{GAP}(turn(_token)?|text|sentence|utterance|message)"
SPELT = re.compile(rf"_?[<\[]{BAR}({WORDS}){BAR}[>\]]", re.IGNORECASE)
# What ends a part of an answer alone where the others end all of it: gpt-oss, Solar.
PART, WHOLES = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# An end in Llama 2, and in Gemma a tag of HTML.
SLASH_S = "</s>"


def find_ends(place: Path, tokenizer: Tokenizer | None) -> dict[int, tuple[str, ...]]:
    """The ids of ends, each with the files, keys or reasons that make it one, for the model of a folder or GGUF file.

    Without a tokenizer nothing is known of names. Raises ModelRefused about a file that cannot be read.
    """
    gguf = gguf_in(place)
    if gguf is None:
        said = [(token_id, file) for file in IDS_IN for token_id in _ids(_object(place / file).get("eos_token_id"))]
        for file in NAMES_IN if tokenizer is not None else ():
            token = _object(place / file).get("eos_token")
            name = token.get("content") if isinstance(token, dict) else token
            named = tokenizer.token_to_id(name) if isinstance(name, str) and tokenizer is not None else None
            if named is not None:
                said.append((named, file))
    else:
        metadata = GgufFile.read(gguf).metadata
        said = [(token_id, key) for key in ENDS for token_id in _ids(metadata.get(key))]
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        ends = {name: token_id for name, token_id in vocabulary.items() if name in NAMED or SPELT.fullmatch(name)}
        if any(whole <= ends.keys() for whole in WHOLES):
            ends.pop(PART, None)
        added, slash_s = tokenizer.get_added_tokens_decoder(), vocabulary.get(SLASH_S)
        if slash_s in added and added[slash_s].special:
            ends[SLASH_S] = slash_s
        said += [(token_id, ITS_NAME) for token_id in sorted(ends.values())]
    found: dict[int, tuple[str, ...]] = {}
    for token_id, where in said:
        found[token_id] = (*found.get(token_id, ()), where)
    return found


def told(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token for people, by its name and its id."""
    name = None if tokenizer is None else tokenizer.id_to_token(token_id)
    return str(token_id) if name is None else f"{name} ({token_id})"


def _ids(value: object) -> list[int]:
    """Whatever is no id is refused where the model is read."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0]


def _object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelRefused(f"{path} cannot be read as JSON", file=path) from None
    if not isinstance(found, dict):
        raise ModelRefused(f"{path} is no JSON object", file=path)
    return found
