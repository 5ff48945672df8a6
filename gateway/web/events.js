// The typed event stream of /api/generate: one JSON object an event. EventSource cannot post, so this reads the body.

export class Refused extends Error {
  constructor(message, reason = "") {
    super(message);
    this.reason = reason;
  }
}

// Yields {event, data} until the stream ends, which it does well only behind a completion or an error.
export async function* events(body, signal) {
  const response = await fetch("api/generate", {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = "";
  for (;;) {
    const { value, done } = await reader.read();
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
  if (last !== "completion" && last !== "error") throw new Refused("The stream ended before the answer did.");
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
  return new Refused(told?.message ?? `The gateway answered ${response.status}.`, told?.code ?? "");
}
