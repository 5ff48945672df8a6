// Numbers and tokens as people read them. Touches no page.

const NUMBER = new Intl.NumberFormat("en");

export const ORIGINS = ["accepted", "correction", "bonus", "plain"];
export const MEANINGS = {
  accepted: "accepted: the draft guessed it, the target agreed",
  correction: "correction: the target disagreed with the draft",
  bonus: "bonus: the target's, behind accepted guesses",
  plain: "plain: the target's, in a pass without guesses",
};
// What came of branches, which the draft had made while the target was at the round before.
export const AHEAD = {
  hit: "begun ahead",
  miss: "no branch fitted",
  late: "branches came late",
};
const FALLBACKS = {
  draft_absent: "the draft is away",
  draft_lost: "the draft was lost",
  draft_late: "the draft was late",
  draft_context: "longer than the draft's context",
  draft_refused: "the draft refused",
};

export function count(value) {
  return NUMBER.format(value);
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.01 ? 1 : 0)} %`;
}

// A log-probability as the probability that it stands for.
export function probability(logprob) {
  if (logprob === null || logprob === undefined) return null;
  const value = Math.exp(logprob);
  return value >= 0.0001 || value === 0 ? value.toFixed(4) : value.toExponential(1);
}

// Microseconds in the unit that needs few digits.
export function time(us) {
  if (us < 1e4) return `${(us / 1e3).toFixed(2)} ms`;
  if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e5 ? 1 : 0)} ms`;
  return `${(us / 1e6).toFixed(2)} s`;
}

export function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value.toFixed(1);
}

// A drafter; the draft service's own choice has no name.
export function name(drafter) {
  return drafter || "draft";
}

const GUESSERS = {
  hosted: "the draft in the target's process",
  grammar: "the grammar, which allows nothing else there",
};

export function guesser(drafter) {
  return GUESSERS[drafter] ?? `the drafter ${drafter}`;
}

export function why(reason) {
  return FALLBACKS[reason] ?? "";
}

// A token on one line, with what cannot be seen made visible.
export function visible(text) {
  return text === "" ? "◌" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "·");
}
