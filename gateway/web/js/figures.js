// The legend's counts and the figures of a run, as text in places that the page has.

import { count, name, percent, plural, rate, time } from "./format.js";

export function drawLegend(legend, run) {
  for (const [origin, number] of Object.entries(run.counts)) set(legend, `[data-count="${origin}"]`, count(number));
}

export function drawFigures(list, run) {
  const accepted = run.positions.reduce((sum, place) => sum + place.accepted, 0);
  const told = {
    rate: run.rate === null ? "–" : rate(run.rate),
    first: run.firstUs === null ? "–" : time(run.firstUs),
    tokens: count(run.tokens.length),
    passes: count(run.passes),
    length: run.passes ? (1 + accepted / run.passes).toFixed(2) : "–",
    alpha: run.evaluated ? percent(accepted / run.evaluated) : "–",
  };
  for (const [name, text] of Object.entries(told)) set(list, `[data-figure="${name}"]`, text);
}

// What an answer waits for that has no token yet, of what the gateway has said so far.
export function life(run, elapsedMs) {
  if (run.ended || run.rounds.length > 0) return "";
  const passed = `${(elapsedMs / 1e3).toFixed(1)} s`;
  if (run.read > 0) return `${count(run.read)} of ${plural(run.opened.prompt_tokens, "token")} of the prompt read · ${passed}`;
  if (run.opened !== null) return `Reading the prompt of ${plural(run.opened.prompt_tokens, "token")} · ${passed}`;
  if (run.waiting === null) return `Asking the gateway · ${passed}`;
  const { place, places } = run.waiting;
  return `Number ${count(place)} in the queue: ${places === 1 ? "the only place is taken" : `all ${count(places)} places are taken`} · ${passed}`;
}

export function summary(run) {
  if (run.error) return run.opened === null ? "No answer came." : "The answer broke off.";
  if (run.stopped) return `Stopped after ${count(run.tokens.length)} tokens.`;
  const speed = run.rate === null ? "" : `, ${rate(run.rate)} tokens a second`;
  return `Done: ${count(run.tokens.length)} tokens${speed}.`;
}

// How a run ended, and what else its completion says.
export function result(run) {
  const { completion } = run;
  if (run.told !== null) return run.told;
  if (completion === null && run.opened === null) return run.stopped ? summary(run) : "";
  if (completion === null) return `${summary(run)} Seed ${run.opened.seed}.`;
  const { usage, timings } = completion;
  const ends = { eos: "an end of text", stop_token: "a stop token", stop_string: "a stop string", length: "the most tokens" };
  return [
    `Ended by ${ends[completion.finish_reason]}`,
    `seed ${completion.seed}`,
    drawn(run.opened.sampling),
    `${count(usage.prompt_tokens)} prompt tokens, ${count(usage.cached_prompt_tokens)} of them cached`,
    ...(timings.queue_us > 1000 ? [`waited ${time(timings.queue_us)} for a place`] : []),
    ...(completion.survival.target_reopens ? [`target reopened ${count(completion.survival.target_reopens)} times`] : []),
    ...(completion.follows_target ? [] : [`rule ${completion.rule}: not the target's distribution`]),
    ...byDrafter(completion.speculation.drafters),
    ...unguessed(run),
  ].join(" · ");
}

// How tokens were drawn: what the form said, or the model where it said nothing.
function drawn({ temperature, top_p: topP }) {
  return `temperature ${temperature}${temperature > 0 && topP < 1 ? `, top-p ${topP}` : ""}`;
}

// Where several guessed, how much of what each of them guessed was kept.
function byDrafter(drafters) {
  if (drafters.length < 2) return [];
  return drafters.map((each) => `${name(each.drafter)} ${count(each.accepted_tokens)} of ${plural(each.draft_tokens, "guess")} kept`);
}

// With auto on a small target most passes have no guesses, and somebody who came to see some should know why.
function unguessed(run) {
  const plain = run.rounds.slice(1).filter((round) => round.draft_count === 0 && round.fallback_reason === null).length;
  const { enabled, draft_count: wanted } = run.request.speculation;
  if (!enabled || wanted !== "auto" || 2 * plain <= run.passes) return [];
  return [`auto made no guesses in ${count(plain)} of ${count(run.passes)} passes, because plain decoding is faster here`];
}

function set(root, selector, text) {
  const place = root.querySelector(selector);
  if (place.textContent !== text) place.textContent = text;
}
