// A request as code that others can run. Quotes for the shell and for Python, and sends nothing. Where the gateway asks
// for a key, the code takes it from the environment.

const RULES = "ACCEPTANCE_RULE_";
// What the client of OpenAI takes by name; all else goes as it is.
const BY_NAME = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop"];
const OF_CHAT = ["response_format", "tools", "tool_choice"];
// Where gRPC has them.
const SAMPLING = [
  ...["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"],
  ...["ignore_eos", "logit_bias"],
];
const OUTSIDE = ["prompt", "messages", "tools", "tool_choice", "speculation", "response_format", "seed"];
const SETTINGS = ["lenience", "typical_epsilon", "typical_delta"];
const VARIABLE = 'os.environ["OUTRIDER_API_KEY"]';
const HEADER = '  -H "authorization: Bearer $OUTRIDER_API_KEY" \\\n';

// What /v1 takes: a prompt, or the messages of a conversation. The seed stays digits: 64 bits do not fit into a number of
// JavaScript.
function body(request, model) {
  const { seed, ...rest } = { model, ...request };
  const { enabled, ...speculation } = rest.speculation;
  return { ...rest, ...(seed === undefined ? {} : { seed: BigInt(seed) }), speculation: enabled ? speculation : { enabled } };
}

function json(value, indent = "") {
  const inner = `${indent}  `;
  if (typeof value === "bigint") return String(value);
  if (Array.isArray(value)) return `[${value.map((each) => json(each)).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const rows = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${json(each, inner)}`);
  return `{\n${rows.join(",\n")}\n${indent}}`;
}

function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// JSON's strings and numbers are Python's too; its words are not.
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  return typeof value === "bigint" ? String(value) : JSON.stringify(value);
}

function curl(request, { origin, model, keyed }) {
  return `curl -N ${origin}v1/${request.messages ? "chat/" : ""}completions \\\n  -H 'content-type: application/json' \\\n${keyed ? HEADER : ""}  -d ${shell(json({ ...body(request, model), stream: true }))}`;
}

function picked(value, names) {
  return Object.fromEntries(Object.entries(value).filter(([name]) => names.includes(name)));
}

function without(value, names) {
  return Object.fromEntries(Object.entries(value).filter(([name]) => !names.includes(name)));
}

function openai(request, { origin, model, keyed }) {
  const all = body(request, model);
  const names = [...BY_NAME, ...(request.messages ? OF_CHAT : [])];
  const rows = Object.entries(picked(all, names)).map(([name, value]) => `    ${name}=${python(value)},`);
  const [maker, text] = request.messages ? ["chat.completions", 'delta.content or ""'] : ["completions", "text"];
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}v1", api_key=${keyed ? VARIABLE : '"none"'})`,
    `stream = client.${maker}.create(`,
    ...rows,
    "    stream=True,",
    `    extra_body=${python(without(all, names))},`,
    ")",
    "for chunk in stream:",
    `    print(chunk.choices[0].${text} if chunk.choices else "", end="", flush=True)`,
  ].join("\n");
}

// The schema that an answer follows, where it follows one.
function schemaOf({ response_format: format }) {
  if (format === undefined) return undefined;
  return format.type === "json_schema" ? format.json_schema.schema : { type: "object" };
}

// Calls of earlier turns, as gRPC and its client have them.
function flat(messages) {
  return messages.map(({ tool_calls: calls, ...message }) => ({
    ...message, ...(calls ? { tool_calls: calls.map(({ id, function: { name, arguments: text } }) => ({ id, name, arguments: text })) } : {}),
  }));
}

function grpcurl(request, { grpc, keyed }) {
  const { speculation, tools, tool_choice: choice } = request;
  const [sampling, settings, schema] = [picked(request, SAMPLING), picked(speculation, SETTINGS), schemaOf(request)];
  const message = {
    ...(request.messages ? {} : { text: request.prompt }),
    ...without(request, [...OUTSIDE, ...SAMPLING]),
    ...(Object.keys(sampling).length ? { sampling } : {}),
    ...(request.seed === undefined ? {} : { seed: BigInt(request.seed) }),
    ...(schema === undefined ? {} : { constraint: { json_schema: JSON.stringify(schema) } }),
    speculation: {
      ...(speculation.draft_count === "auto" ? {} : { draft_count: speculation.draft_count }),
      rule: RULES + speculation.rule.toUpperCase(),
      ...(speculation.drafter ? { drafter: speculation.drafter } : {}),
      ...(Object.keys(settings).length ? { acceptance: settings } : {}),
    },
  };
  if (!request.messages) return called("Generate", message, grpc, keyed);
  const offered = (tools ?? []).map(({ function: { parameters, ...tool } }) => ({ ...tool, ...(parameters ? { parameters: JSON.stringify(parameters) } : {}) }));
  const mode = typeof choice === "string" ? { mode: `TOOL_MODE_${choice.toUpperCase()}` } : { mode: "TOOL_MODE_REQUIRED", names: [choice?.function.name] };
  const chat = {
    messages: flat(request.messages), generation: message,
    ...(tools ? { tools: offered } : {}), ...(choice === undefined ? {} : { tool_choice: mode }),
  };
  return called("Chat", chat, grpc, keyed);
}

function called(method, asked, grpc, keyed) {
  return `grpcurl -plaintext${keyed ? ` \\\n${HEADER} ` : ""} -d ${shell(json(asked))} \\\n  ${grpc} outrider.v1.GenerationService/${method}`;
}

function outrider(request, { grpc, keyed }) {
  const { prompt, messages, speculation, tools, tool_choice: choice, ...fields } = without(body(request, ""), ["model", "response_format"]);
  if (speculation.draft_count === "auto") delete speculation.draft_count;
  const named = (values) => Object.entries(values).map(([name, value]) => `${name}=${python(value)}`).join(", ");
  const schema = schemaOf(request);
  const bias = fields.logit_bias && Object.entries(fields.logit_bias).map(([id, value]) => `${id}: ${value}`).join(", ");
  return [
    ...(keyed ? ["import os", ""] : []),
    `from outrider.client import Client, Speculation${tools ? ", Tool" : ""}`,
    "",
    `with Client(${JSON.stringify(grpc)}${keyed ? `, api_key=${VARIABLE}` : ""}) as client:`,
    `    stream = client.${messages ? "chat" : "generate"}(`,
    `        ${python(messages ? flat(messages) : prompt)},`,
    ...Object.entries(without(fields, ["logit_bias"])).map(([name, value]) => `        ${name}=${python(value)},`),
    ...(bias ? [`        logit_bias={${bias}},`] : []),
    ...(schema === undefined ? [] : [`        json_schema=${python(schema === true || schema === false ? JSON.stringify(schema) : schema)},`]),
    ...(tools ? [`        tools=[${tools.map((tool) => `Tool(${named(tool.function)})`).join(", ")}],`] : []),
    ...(choice === undefined ? [] : [`        tool_choice=${python(typeof choice === "string" ? choice : choice.function.name)},`]),
    `        speculation=Speculation(${named(speculation)}),`,
    "    )",
    "    for event in stream:",
    '        print(event.text, end="", flush=True)',
  ].join("\n");
}

export const SNIPPETS = { curl, openai, outrider, grpcurl };
