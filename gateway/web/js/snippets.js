// A request as code that others can run. Quotes for the shell and for Python, and sends nothing. Where the gateway asks
// for a key, the code takes it from the environment.

const RULES = "ACCEPTANCE_RULE_";
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
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  return typeof value === "bigint" ? String(value) : JSON.stringify(value);
}

function curl(request, { origin, model, keyed }) {
  return `curl -N ${origin}v1/${request.messages ? "chat/" : ""}completions \\\n  -H 'content-type: application/json' \\\n${keyed ? HEADER : ""}  -d ${shell(json({ ...body(request, model), stream: true }))}`;
}

function openai(request, { origin, model, keyed }) {
  const { speculation, ...rest } = body(request, model);
  const rows = Object.entries(rest).map(([name, value]) => `    ${name}=${python(value)},`);
  const [maker, text] = request.messages ? ["chat.completions", 'delta.content or ""'] : ["completions", "text"];
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}v1", api_key=${keyed ? VARIABLE : '"none"'})`,
    `stream = client.${maker}.create(`,
    ...rows,
    "    stream=True,",
    `    extra_body={"speculation": ${python(speculation)}},`,
    ")",
    "for chunk in stream:",
    `    print(chunk.choices[0].${text} if chunk.choices else "", end="", flush=True)`,
  ].join("\n");
}

function grpcurl(request, { grpc, keyed }) {
  const { speculation } = request;
  const sampling = Object.entries({ temperature: request.temperature, top_p: request.top_p }).filter(([, value]) => value !== undefined);
  const message = {
    ...(request.messages ? {} : { text: request.prompt }),
    max_tokens: request.max_tokens,
    ...(sampling.length ? { sampling: Object.fromEntries(sampling) } : {}),
    ...(request.seed === undefined ? {} : { seed: BigInt(request.seed) }),
    ...(request.stop ? { stop: request.stop } : {}),
    speculation: {
      ...(speculation.draft_count === "auto" ? {} : { draft_count: speculation.draft_count }),
      rule: RULES + speculation.rule.toUpperCase(),
      ...(speculation.drafter ? { drafter: speculation.drafter } : {}),
    },
  };
  const [method, asked] = request.messages ? ["Chat", { messages: request.messages, generation: message }] : ["Generate", message];
  return `grpcurl -plaintext${keyed ? ` \\\n${HEADER} ` : ""} -d ${shell(json(asked))} \\\n  ${grpc} outrider.v1.GenerationService/${method}`;
}

function outrider(request, { grpc, keyed }) {
  const { prompt, messages, speculation, ...fields } = body(request, "");
  delete fields.model;
  if (speculation.draft_count === "auto") delete speculation.draft_count;
  const settings = Object.entries(speculation).map(([name, value]) => `${name}=${python(value)}`).join(", ");
  return [
    ...(keyed ? ["import os", ""] : []),
    "from outrider.client import Client, Speculation",
    "",
    `with Client(${JSON.stringify(grpc)}${keyed ? `, api_key=${VARIABLE}` : ""}) as client:`,
    `    stream = client.${messages ? "chat" : "generate"}(`,
    `        ${python(messages ?? prompt)},`,
    ...Object.entries(fields).map(([name, value]) => `        ${name}=${python(value)},`),
    `        speculation=Speculation(${settings}),`,
    "    )",
    "    for event in stream:",
    '        print(event.text, end="", flush=True)',
  ].join("\n");
}

export const SNIPPETS = { curl, openai, outrider, grpcurl };
