// One run: what its events add up to. Touches no page and knows no time but that of the events.

import { isTree } from "./trees.js";

export class Run {
  constructor(request) {
    this.request = request;
    // Runs of the same request that a race has made beside this one.
    this.again = [];
    this.opened = null;
    this.completion = null;
    this.error = null;
    this.stopped = false;
    this.tokens = [];
    this.rounds = [];
    this.choices = [];
    this.events = [];
    this.rest = "";
    this.thought = "";
    this.calls = [];
    this.waiting = null;
    this.read = 0;
    this.timings = null;
    // How it ended, of one that was kept and has no completion any more.
    this.told = null;
    this.counts = { accepted: 0, correction: 0, bonus: 0, plain: 0, rejected: 0 };
    this.positions = [];
    this.evaluated = 0;
    this.times = { draft: 0, verify: 0, wire: 0 };
    this.numericsIds = [];
  }

  get ended() {
    return this.completion !== null || this.error !== null || this.stopped || this.told !== null;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("") + this.rest;
  }

  // Passes of the target after the prompt's own, as the papers count them.
  get passes() {
    return Math.max(0, this.rounds.length - 1);
  }

  get firstUs() {
    return this.timings?.first_token_us ?? this.rounds[0]?.time_us ?? null;
  }

  get lastUs() {
    return this.timings?.total_us ?? this.rounds.at(-1)?.time_us ?? 0;
  }

  // Tokens a second after the first one, which waits for the prompt.
  get rate() {
    const last = this.rounds.at(-1);
    if (!last || this.rounds.length < 2) return null;
    const behind = this.tokens.length - this.rounds[0].tokens.length;
    return (behind * 1e6) / Math.max(1, last.time_us - this.rounds[0].time_us);
  }

  take({ event, data }, receivedMs) {
    this.events.push({ received_ms: receivedMs, event, data });
    if (event === "waiting") this.waiting = data;
    else if (event === "opened") this.takeOpened(data);
    else if (event === "reading") this.read = data.read_tokens;
    else if (event === "round") this.takeRound(data);
    else if (event === "completion") this.takeCompletion(data);
    else if (event === "error") this.error = data;
  }

  takeOpened(data) {
    this.opened = data;
    this.numericsIds.push(data.numerics_id);
  }

  takeRound(round) {
    const index = this.rounds.length;
    round.index = index;
    round.isTree = isTree(round);
    this.rounds.push(round);
    // One that comes without has that of the round before.
    this.choices.push(round.choice ?? this.choices.at(-1) ?? null);
    this.takeApart(round);
    if (round.new_numerics_id) this.numericsIds.push(round.new_numerics_id);
    for (const [place, token] of round.tokens.entries()) {
      this.counts[token.origin] += 1;
      this.tokens.push({ ...token, round: index, position: round.base_len + place });
    }
    this.counts.rejected += Math.max(0, round.draft_count - round.accepted_count);
    if (index === 0) return;
    this.evaluated += round.evaluated_count;
    // Of guesses side by side one is kept at most, so they count as one.
    for (let place = 0; place < round.draft_depth; place += 1) {
      const at = (this.positions[place] ??= { drafted: 0, accepted: 0 });
      at.drafted += 1;
      if (place < round.accepted_count) at.accepted += 1;
    }
    for (const [name, us] of Object.entries(parts(round))) this.times[name] += us;
  }

  takeCompletion(data) {
    this.completion = data;
    this.timings = data.timings;
    this.rest = data.text;
    this.takeApart(data);
  }

  // What is no text of the answer: what was thought, and calls of tools, which come in pieces.
  takeApart(data) {
    this.thought += data.reasoning ?? "";
    for (const { index, call_id: id, name, text } of data.calls ?? []) {
      if (name === undefined) this.calls[index].arguments += text;
      else this.calls[index] = { id, name, arguments: "" };
    }
  }
}

// Where a round's time went, in microseconds. What neither service computed is the way, the queues and the gateway.
export function parts(round) {
  const draft = round.draft_compute_us;
  const verify = round.verify_compute_us;
  return { draft, verify, wire: Math.max(0, round.round_us - draft - verify) };
}

// How two runs compare: null while they agree all along, otherwise the first place where they do not.
export function difference(one, other) {
  const longest = Math.max(one.tokens.length, other.tokens.length);
  for (let index = 0; index < longest; index += 1) {
    if (one.tokens[index]?.token_id !== other.tokens[index]?.token_id) return index;
  }
  return null;
}
