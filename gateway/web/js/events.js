// The typed event stream of /page/generate: one JSON object an event. EventSource cannot post, so this reads the body.

// `param` is the field that the gateway finds wrong, where it is one.
export class Refused extends Error {
  constructor(message, reason = "", param = null) {
    super(message);
    this.reason = reason;
    this.param = param;
  }
}

const UNREACHED = "The gateway cannot be reached. Start it again with `outrider up`, then ask again.";
const LOST = "The gateway was lost in mid-answer. When it is back, the same prompt and seed give the same answer.";

// What browsers say of a lost connection is two words, in every browser others.
async function connected(promise, sentence) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused(sentence);
  }
}

// Yields {event, data} until the stream ends, which it does well only after a completion or an error.
export async function* events(gateway, body, signal) {
  const options = { method: "POST", headers: { "content-type": "application/json", accept: "text/event-stream" }, signal, insists: true };
  const response = await connected(gateway.call("page/generate", { ...options, body: JSON.stringify(body) }), UNREACHED);
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = "";
  for (;;) {
    const { value, done } = await connected(reader.read(), LOST);
    if (done) break;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parsed(block);
      if (event === null) continue;
      last = event.event;
      yield event;
    }
  }
  if (last !== "completion" && last !== "error") throw new Refused(LOST);
}

// An event, or null for a comment, which only keeps the connection alive.
export function parsed(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { event, data: JSON.parse(data.join("\n")) } : null;
}

async function refusal(response) {
  let told = null;
  try {
    told = (await response.json()).error ?? null;
  } catch {
    // Not ours: a proxy's page, for example. The status has to do.
  }
  return new Refused(told?.message ?? `The gateway answered ${response.status}.`, told?.code ?? "", told?.param ?? null);
}
