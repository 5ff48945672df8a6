"""Bodies with one fault each, by the field that is at fault. Knows no gateway.

Values are JSON texts, because some of them are numbers that no JSON library writes.
"""

import json
from typing import Any

from support.rest.rest_stack import CHAT, COMPLETIONS

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "target", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "seed": 1},
    COMPLETIONS: {"model": "target", "prompt": "Once", "max_tokens": 8, "seed": 1},
}
# Characters that cannot be said in UTF-8, and more digits than a number has.
LONE, DIGITS = r'"\ud83d"', "9" * 5000
NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"]
NO_NUMBER = ['"1"', "true", "[]", "{}", "[1]", '{"a":1}']
NO_INTEGER = [*NO_NUMBER, *NOT_FINITE, "1.5", "1e30", DIGITS, "-" + DIGITS]
NO_BOOLEAN = ['"true"', "1", "0", "[]", "{}", *NOT_FINITE]
NO_STRING = ["1", "true", "[]", "{}", "NaN"]
LONG = json.dumps("x" * 257)
RARE = json.dumps("\U0001f9ff\U00013000" * 60)
MANY = {count: json.dumps(["good"] * count) for count in (9, 65, 5000)}


def schema_format(schema: str, name: str = '"tale"') -> str:
    """A response_format with a schema that is to be enforced whole."""
    return f'{{"type":"json_schema","json_schema":{{"name":{name},"strict":true,"schema":{schema}}}}}'


SPECULATION = {
    "enabled": NO_BOOLEAN,
    "draft_count": ["-1", "65", '"many"', "true", "1.5", "[]", "{}", *NOT_FINITE, DIGITS],
    "rule": ['"greedy"', *NO_STRING, LONE],
    "lenience": ["0.5", "0", "-1", "1.1", *NO_NUMBER, *NOT_FINITE],
    "typical_epsilon": ["0.5", "0", "-1", "1.1", *NO_NUMBER, *NOT_FINITE],
    "typical_delta": ["0.5", "0", "-1", "1.1", *NO_NUMBER, *NOT_FINITE],
    "drafter": [
        *('"none-such"', LONE, json.dumps("x" * 5000), '["none-such"]', '["model","none-such"]', '["model","auto"]'),
        *('["model","model"]', "[]", '[""]', "[1]", "[null]", f"[{LONE}]", json.dumps(["model"] * 9)),
        *("1", "true", "{}", "NaN"),
    ],
    "shape": [
        *('{"max_depth":33}', '{"max_depth":-1}', '{"max_depth":1.5}', '{"max_children":9}', '{"max_children":"2"}'),
        *('{"expansions":[9]}', '{"expansions":[0]}', '{"expansions":2}', '{"expansions":[true]}', '{"unknown":1}'),
        *(json.dumps({"expansions": [1] * 33}), '{"expansions":[8,8,8]}', '"wide"', "1", "[]"),
    ],
    "return_rounds": NO_BOOLEAN,
    "unknown": ["1", "null"],
}
BOTH: dict[str, list[str]] = {
    "model": [LONE, *NO_STRING],
    "max_tokens": ["0", "-1", "2147483648", "5000", *NO_INTEGER],
    "temperature": ["-0.1", "-1", "100.1", "1e308", "-1e308", *NO_NUMBER, *NOT_FINITE, DIGITS],
    "top_p": ["0", "-0.1", "1.1", "1e308", *NO_NUMBER, *NOT_FINITE],
    "top_k": ["-2", "-5", "2147483648", *NO_INTEGER],
    "min_p": ["-0.1", "1.1", *NO_NUMBER, *NOT_FINITE],
    "presence_penalty": ["-2.1", "2.1", "1e308", *NO_NUMBER, *NOT_FINITE],
    "frequency_penalty": ["-2.1", "2.1", "1e308", *NO_NUMBER, *NOT_FINITE],
    "repetition_penalty": ["0", "-1", "100.1", *NO_NUMBER, *NOT_FINITE],
    "logit_bias": [
        *('{"12":100.1}', '{"12":-101}', '{"12":NaN}', '{"12":Infinity}', '{"12":"5"}', '{"12":null}', '{"12":true}'),
        *('{"4096":1}', '{"-1":1}', '{"x":1}', '{"1.5":1}', '{"":1}', '{" 12":1}', '{"+12":1}', '{"0x1":1}'),
        *('{"' + DIGITS + '":1}', "[1]", '"12"', "1", "true", r'{"\ud83d":1}', '{"\u0661\u0662":1}', '{"1_2":1}'),
        *(json.dumps(dict.fromkeys(map(str, range(count)), 1.0)) for count in (301, 4096)),
    ],
    "min_tokens": ["-1", "9", "2147483648", *NO_INTEGER],
    "ignore_eos": NO_BOOLEAN,
    "return_token_ids": NO_BOOLEAN,
    "n": ["0", "-1", "9", "1000000000", *NO_INTEGER],
    "use_beam_search": NO_BOOLEAN,
    "length_penalty": ["1.0", "10.1", "-10.1", "1e308", *NO_NUMBER, *NOT_FINITE],
    "early_stopping": ["true", '"never"', '"always"', "0", "[]", "{}", *NOT_FINITE],
    "seed": ["9223372036854775808", "-9223372036854775809", *NO_INTEGER],
    "stop": [
        '[""]',
        LONG,
        f"[{LONG}]",
        MANY[65],
        MANY[5000],
        "1",
        "true",
        "{}",
        "[1]",
        "[null]",
        LONE,
        f"[{LONE}]",
    ],
    "stop_token_ids": ["[4096]", "[-1]", '["5"]', "[1.5]", "[true]", "[NaN]", "5", "{}", json.dumps([5] * 65)],
    "banned_words": ['[""]', f"[{LONG}]", f"[{RARE}]", MANY[65], '"the"', "[1]", "{}", f"[{LONE}]"],
    "cache_salt": [json.dumps("x" * 65), json.dumps("\u00e9" * 33), *NO_STRING, LONE],
    "prediction": [
        *("{}", '"Once"', "[]", "1", '{"type":"content"}', '{"content":"x"}', '{"type":"x","content":"x"}'),
        *('{"type":"content","content":1}', '{"type":"content","content":[]}', '{"type":"content","content":null}'),
        '{"type":"content","content":[{"type":"image_url","image_url":{"url":"x"}}]}',
        '{"type":"content","content":"x","unknown":1}',
        f'{{"type":"content","content":{LONE}}}',
        json.dumps({"type": "content", "content": "so " * 5000}),
    ],
    "response_format": [
        *('{"type":"x"}', '"text"', "1", "{}", '{"type":"json_schema"}', '{"type":"text","triggers":["x"]}'),
        *(
            schema_format("{}", name='""'),
            schema_format("5"),
            schema_format('{"not":{}}'),
            schema_format('{"type":"x"}'),
        ),
        schema_format('{"$ref":"http://example.com"}'),
        '{"type":"structural_tag","structures":[],"triggers":[]}',
        '{"type":"structural_tag","structures":[{"begin":"<a>","end":1}],"triggers":["<a"]}',
    ],
    "structured_outputs": ["{}", "[]", '"x"', '{"regex":"a","choice":["a"]}', '{"unknown":1}', f'{{"regex":{LONE}}}'],
    "structured_outputs.json": [
        "1",
        '"{"',
        '"5"',
        "false",
        '{"uniqueItems":true}',
        '{"type":"array","minItems":3,"maxItems":1}',
    ],
    "structured_outputs.json_object": ["false", "1", '"x"', "[]"],
    "structured_outputs.regex": ['""', '"("', '"(?=a)"', '"x{200000}"', json.dumps("a" * 8193), *NO_STRING],
    "structured_outputs.choice": ["[]", '[""]', '["a",1]', '"a"', json.dumps(["a"] * 1025)],
    "structured_outputs.grammar": ['""', '"root = 5"', '"start: x"', json.dumps("a" * (256 << 10) + "b"), *NO_STRING],
    "structured_outputs.structural_tag": ["1", "{}", '"{"', '{"structures":[{}],"triggers":["a"]}'],
    "user": ["1", "[]", LONE],
    "stream": NO_BOOLEAN,
    "stream_options": ['{"include_usage":true}', '{"unknown":1}', "true", "[]", '"yes"'],
    "speculation": ["true", "1", "[]", '"auto"'],
    "unknown_field": ["1", "null", "{}"],
    **{f"speculation.{name}": values for name, values in SPECULATION.items()},
}
ONLY: dict[str, dict[str, list[str]]] = {
    CHAT: {
        "messages": [
            *("[]", '"Once"', "{}", "null", "[1]", "[{}]", "[null]", '[{"role":"user"}]', '[{"content":"x"}]'),
            *('[{"role":"wizard","content":"x"}]', '[{"role":1,"content":"x"}]', '[{"role":"user","content":1}]'),
            '[{"role":"user","content":"x","unknown":1}]',
            '[{"role":"user","content":"x","name":"bob"}]',
            '[{"role":"tool","content":"x","tool_call_id":"a"}]',
            '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]',
            '[{"role":"user","content":[{"type":"text"}]}]',
            f'[{{"role":"user","content":{LONE}}}]',
            json.dumps([{"role": "user", "content": "x"}] * 5000),
        ],
        "max_completion_tokens": ["0", "-1", "2147483648", *NO_INTEGER],
        "logprobs": ['"yes"', "1", "[]", "{}"],
        "top_logprobs": ["-1", "21", *NO_INTEGER, "2"],
        "prompt": ['"x"'],
        "tools": ["1", "{}", "[1]", '[{"type":"function"}]', '[{"type":"x","function":{"name":"f"}}]'],
        "tool_choice": ['"x"', "1", '{"type":"function","function":{"name":"f"}}', '"required"', '"auto"'],
        "include_reasoning": NO_BOOLEAN,
        "reasoning_effort": ['"x"', "1", "[]"],
        "chat_template_kwargs": ["1", "[]", '{"a":[]}', '{"a":null}', '{"a":"x"}', f'{{"a":{LONE}}}'],
        "parallel_tool_calls": ['"x"', "1"],
        "metadata": ["1", '{"a":1}', "[]", json.dumps({str(number): "x" for number in range(17)})],
        "store": ['"x"', "1"],
        "service_tier": ['"x"', "1"],
        "safety_identifier": ["1", LONE],
        "prompt_cache_key": ["1", LONE],
        "add_generation_prompt": NO_BOOLEAN,
        "continue_final_message": NO_BOOLEAN,
    },
    COMPLETIONS: {
        "prompt": [
            *('""', "[]", '[""]', "1", "true", "{}", "null", '["x",1]', "[[]]", "[[1],2]", "[4096]", "[-1]", "[1.5]"),
            *("[true]", "[NaN]", "[[4096]]", "[null]", LONE, f"[{LONE}]", json.dumps(["x"] * 1000)),
        ],
        "logprobs": ["-1", "21", *NO_INTEGER],
        "echo": NO_BOOLEAN,
        "best_of": ["2", "-1", '"x"'],
        "messages": ["[]"],
    },
}
# Named in OpenAI's reference, and not served: each would change an answer if it were.
UNSUPPORTED = {
    **dict.fromkeys(("functions", "prompt_cache_options", "moderation"), '[{"name":"f"}]'),
    **dict.fromkeys(("audio", "web_search_options"), '{"voice":"x"}'),
    "modalities": "[]",
    **dict.fromkeys(("function_call", "verbosity", "prompt_cache_retention", "suffix"), '"x"'),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), "false"),
    "include_stop_str_in_output": "true",
    "priority": "1",
    "store": "true",
    "service_tier": '"priority"',
    "tools": '[{"type":"function","function":{"name":"f"}}]',
}
# What clients send without wanting anything of it, on both routes and in chat alone.
HARMLESS_EVERYWHERE: dict[str, Any] = {
    "user": "someone",
    "top_k": -1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "priority": 0,
}
HARMLESS: dict[str, Any] = {
    **HARMLESS_EVERYWHERE,
    "modalities": ["text"],
    "functions": [],
    "audio": {},
    "verbosity": "medium",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "parallel_tool_calls": True,
}


def faults(path: str) -> dict[str, list[str]]:
    """All faults of an endpoint, by field."""
    return {**BOTH, **ONLY[path]}


def with_fault(path: str, field: str, value: str) -> bytes:
    """The good body with a value that JSON writes so, or does not."""
    outer, _, inner = field.partition(".")
    text = f'{{"{inner}":{value}}}' if inner else value
    # JSON has no NaN, but this is where a client would write it.
    fields = {name: json.dumps(each) for name, each in GOOD[path].items()} | {outer: text}
    return ("{" + ",".join(f'"{name}":{each}' for name, each in fields.items()) + "}").encode()
