// The race: the same request with and without speculation, and what came of it. Touches no page.

import { count, plural, rate, time, visible } from "./format.js";
import { difference } from "./run.js";

const TOLERANCE = 1.1;

// Both lanes read their prompt themselves: a salt of its own keeps each from finding what the other left in the cache.
export function lanes(request) {
  const salt = crypto.getRandomValues(new Uint32Array(2)).join("-");
  const lane = (name, enabled) => ({
    ...request,
    probabilities: false,
    cache_salt: `race-${salt}-${name}`,
    speculation: { ...request.speculation, enabled },
  });
  return [lane("speculative", true), lane("plain", false)];
}

export function clock(run, elapsedMs) {
  const us = run.completion ? run.completion.timings.total_us : elapsedMs * 1e3;
  const speed = run.rate === null ? "" : `, ${rate(run.rate)}/s`;
  return `${(us / 1e6).toFixed(2)} s, ${count(run.tokens.length)} tokens${speed}`;
}

// What a race showed: whether the same, a headline and sentences.
export function verdict(fast, plain) {
  if (!fast.completion || !plain.completion) {
    return { same: false, head: "No result", lines: ["Both runs must end by themselves to be compared."] };
  }
  const at = difference(fast, plain);
  const lines = [speed(fast, plain)];
  if (fast.positions.length === 0) lines.push("Neither run had any guesses, so what differs in time is the machine's.");
  const tokens = plural(plain.tokens.length, "token");
  // Only match promises it. Under another rule it is chance, so there is no tick.
  if (at === null && fast.completion.rule !== "match") return { same: false, head: `The same this time: ${tokens}`, lines: [reason(fast, plain), ...lines] };
  if (at === null) return { same: true, head: `✓ Identical token for token: ${tokens}`, lines };
  return { same: false, head: `≠ Differs at token ${at + 1}`, lines: [told(fast, plain, at), reason(fast, plain), ...lines] };
}

function speed(fast, plain) {
  const [own, other] = [fast.completion.timings.total_us, plain.completion.timings.total_us];
  const ratio = other / own;
  const brought = fast.tokens.length / fast.rounds.length;
  // No round is cheaper than a plain one but for noise, so this was the machine's doing.
  if (ratio > TOLERANCE * brought) {
    return `The machine was busy, so there is no figure of speed: ${ratio.toFixed(2)} times as fast is more than passes of ${brought.toFixed(2)} tokens can bring.`;
  }
  const times = `${time(own)} with speculation, ${time(other)} without`;
  const [ours, theirs] = [fast.rate, plain.rate];
  const behind = ours && theirs ? ` After the first token ${rate(ours)} against ${rate(theirs)} tokens a second.` : "";
  const cost = `A round took ${time(mean(fast))} and a pass brought ${brought.toFixed(2)} tokens, the prompt's counted; a plain round took ${time(mean(plain))}.`;
  return `${ratio.toFixed(2)} times ${ratio < 0.98 ? "as fast, so slower" : "as fast"}: ${times}.${behind} ${fast.passes && plain.passes ? cost : ""}`;
}

function mean(run) {
  return (run.times.draft + run.times.verify + run.times.wire) / run.passes;
}

function told(fast, plain, at) {
  const word = (run) => (run.tokens[at] ? `“${visible(run.tokens[at].text)}” (id ${run.tokens[at].token_id})` : "the end");
  return `With speculation ${word(fast)}, without ${word(plain)}.`;
}

function reason(fast, plain) {
  const { rule } = fast.completion;
  const numerics = new Set([...fast.completion.numerics_ids, ...plain.completion.numerics_ids]);
  if (rule === "lenient" || rule === "typical") return `The rule ${rule} does not follow the target's distribution.`;
  if (rule !== "match") return `The rule ${rule} keeps the target's distribution and may draw other tokens; only match promises the same ones.`;
  if (numerics.size > 1) return `The runs were computed in different ways (${[...numerics].join(", ")}); then only the distribution is promised.`;
  return "Under match on the same numerics this must not happen. Please keep the trace: it is a bug.";
}
