// The race: the same request with and without speculation, and what came of it. Touches no page.

import { count, plural, rate, time, visible } from "./format.js";
import { difference } from "./run.js";

// Plain answers of the same tokens differ by less, and no round is cheaper than a plain one but for noise.
const STEADY = 1.3;
const TOLERANCE = 1.1;

// With speculation or without, after one of each: what makes the machine slow for a moment hits two neighbours.
export const AGAIN = [false, true, true, false];

// Each answer reads its prompt itself: a salt of its own keeps it from finding what another left in the cache.
export function lane(request, enabled) {
  const salt = crypto.getRandomValues(new Uint32Array(2)).join("-");
  return { ...request, probabilities: false, cache_salt: `race-${salt}`, speculation: { ...request.speculation, enabled } };
}

export function clock(run, elapsedMs) {
  const us = run.completion ? run.completion.timings.total_us : elapsedMs * 1e3;
  const speed = run.rate === null ? "" : `, ${rate(run.rate)}/s`;
  return `${(us / 1e6).toFixed(2)} s, ${count(run.tokens.length)} tokens${speed}`;
}

// What a race showed: a headline, sentences, and its tone, which is "same" only where tokens and figures are sound. Runs
// that were made again, by turns, count for the times and must say the same.
export function verdict(fast, plain) {
  if (!fast.completion || !plain.completion) {
    return { tone: "other", head: "No result", lines: ["Both runs must end by themselves to be compared."] };
  }
  const turns = [[fast, plain], ...fast.again.map((each, index) => [each, plain.again[index]])];
  const ended = turns.filter((pair) => pair.every((run) => run?.completion));
  const parted = ended.find((pair) => difference(...pair) !== null);
  const busy = doubt(ended, turns.length < 3 || ended.length < turns.length);
  const lines = [busy === "" ? speed(ended) : `There is no figure of speed: ${busy}. ${brought(ended)}`];
  if (fast.positions.length === 0) lines.push("Neither run had any guesses, so what differs in time is the machine's.");
  const tokens = plural(plain.tokens.length, "token");
  if (parted !== undefined) {
    const at = difference(...parted);
    return { tone: "other", head: `≠ Differs at token ${at + 1}`, lines: [told(...parted, at), reason(...parted), ...lines] };
  }
  // Only match promises it. Under another rule it is chance, so there is no tick.
  if (fast.completion.rule !== "match") return { tone: "other", head: `The same this time: ${tokens}`, lines: [reason(fast, plain), ...lines] };
  return { tone: busy === "" ? "same" : "", head: `✓ Identical token for token: ${tokens}`, lines };
}

// Why times say nothing, empty where they do.
function doubt(turns, stopped) {
  if (stopped) return "the race ended before both answers came again";
  const plain = turns.map(([, { completion }]) => completion.timings.total_us);
  const [fastest, slowest] = [Math.min(...plain), Math.max(...plain)];
  if (slowest > STEADY * fastest) return `the machine was busy, for the same answer without speculation took ${time(fastest)} and ${time(slowest)}`;
  const [times, most] = [ratio(turns), perPass(turns)];
  if (times <= TOLERANCE * most) return "";
  return `the machine was busy, for ${times.toFixed(2)} times as fast is more than passes of ${most.toFixed(2)} tokens can bring`;
}

function speed(turns) {
  const [own, other] = [0, 1].map((side) => median(turns.map((pair) => pair[side].completion.timings.total_us)));
  const times = ratio(turns);
  return `${times.toFixed(2)} times ${times < 0.98 ? "as fast, so slower" : "as fast"}, the median of ${turns.length} turns: ${time(own)} with speculation, ${time(other)} without. ${brought(turns)}`;
}

function brought(turns) {
  const [[fast, plain]] = turns;
  if (!fast.passes || !plain.passes) return "";
  return `A pass brought ${perPass(turns).toFixed(2)} tokens, the prompt's counted, and a round took ${time(mean(fast))}, a plain one ${time(mean(plain))}.`;
}

function ratio(turns) {
  return median(turns.map(([fast, plain]) => plain.completion.timings.total_us / fast.completion.timings.total_us));
}

// Tokens for each pass of the target with speculation, all passes counted.
function perPass(turns) {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  return sum(turns.map(([fast]) => fast.tokens.length)) / sum(turns.map(([fast]) => fast.rounds.length));
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const half = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
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
