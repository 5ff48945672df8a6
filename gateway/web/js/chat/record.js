// A conversation as it is kept and as it travels in a file: plain values, a version, and checks of what comes from outside.
//
// Of an answer there is what its text, its marks and its figures are made of. Reasons, probabilities and guesses that
// were not kept are not: they are most of what a run holds, and the trace has them.

import { result } from "../figures.js";
import { ORIGINS } from "../format.js";
import { Run } from "../run.js";

export const VERSION = 1;
const FORMAT = "outrider-conversations";
const NUMBERS = [
  ...["time_us", "round_us", "draft_compute_us", "verify_compute_us"],
  ...["base_len", "draft_count", "draft_depth", "accepted_count", "evaluated_count"],
];
const [TITLE_LEN, MOST_TURNS] = [60, 2000];
const UNENDED = "The page was closed before this answer had ended.";

// The record of a conversation as it is now; `live` is the run that answers its current turn.
export function recordOf({ id, title, turns, current }, system, live = null) {
  const runs = turns.map((turn) => turn.run ?? (turn === current ? live : null));
  return {
    version: VERSION, id, title: title || titleOf(turns[0]), changed: new Date().toISOString(), system,
    turns: turns.map(({ message, results }, place) => ({ message, results, answer: runs[place] === null ? null : packed(runs[place]) })),
  };
}

function titleOf({ message, results }) {
  const text = (message || results[0]?.content || "").replace(/\s+/g, " ").trim();
  return text.length > TITLE_LEN ? `${text.slice(0, TITLE_LEN - 1)}…` : text;
}

function packed(run) {
  return {
    rounds: run.rounds.map((round) => [
      NUMBERS.map((name) => round[name]),
      round.tokens.map((token) => [token.text, ORIGINS.indexOf(token.origin), token.token_id]),
      round.reasoning ? 1 : 0,
    ]),
    rest: run.rest,
    thought: run.thought,
    calls: run.calls,
    seed: run.opened?.seed ?? null,
    times: run.timings === null ? null : [run.timings.first_token_us, run.timings.total_us],
    told: result(run),
    error: run.error?.message ?? (run.ended ? "" : UNENDED),
  };
}

// The turns of a record, each with its run.
export function turnsOf(record) {
  return record.turns.map(({ message, results, answer }) => ({ message, results, run: answer === null ? null : unpacked(answer) }));
}

function unpacked(answer) {
  const run = new Run(null);
  const unknown = { row: null, parent: null, drafter: null, draft_logprob: null, value: null, logprob: null };
  for (const [numbers, tokens, isThought] of answer.rounds) {
    run.takeRound({
      ...Object.fromEntries(NUMBERS.map((name, place) => [name, numbers[place]])),
      tokens: tokens.map(([text, origin, id]) => ({ ...unknown, text, origin: ORIGINS[origin], token_id: id })),
      rejected: [], fallback_reason: null, drafter: "", ...(isThought ? { reasoning: " " } : {}),
    });
  }
  Object.assign(run, { rest: answer.rest, thought: answer.thought, calls: answer.calls, told: answer.told });
  if (answer.times !== null) run.timings = { first_token_us: answer.times[0], total_us: answer.times[1] };
  if (answer.seed !== null) run.opened = { seed: answer.seed };
  if (answer.error !== "") run.error = { reason: "", message: answer.error };
  return run;
}

export function file(records) {
  return { format: FORMAT, version: VERSION, saved: new Date().toISOString(), conversations: records };
}

// The records in the text of a file. Throws an Error whose sentence says what is wrong with it, and where.
export function recordsIn(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is no JSON: ${error.message}.`);
  }
  need(isObject(found) && found.format === FORMAT, "The file", `one of this page's exports: its format is not "${FORMAT}"`);
  need(found.version === VERSION, "The version of the file", `${VERSION}, but ${JSON.stringify(found.version)}: it may come from a newer page`);
  need(Array.isArray(found.conversations), "conversations", "a list");
  for (const [place, each] of found.conversations.entries()) checkRecord(each, `conversations[${place}]`);
  return found.conversations;
}

function checkRecord(value, at) {
  need(isObject(value), at, "an object");
  need(value.version === VERSION, `${at}.version`, String(VERSION));
  for (const name of ["id", "title"]) need(isText(value[name]) && value[name] !== "" && value[name].length <= 200, `${at}.${name}`, "a text of 1 to 200 characters");
  need(isText(value.changed) && !Number.isNaN(Date.parse(value.changed)), `${at}.changed`, "a time");
  need(isText(value.system), `${at}.system`, "a text");
  need(Array.isArray(value.turns) && value.turns.length <= MOST_TURNS, `${at}.turns`, `a list of at most ${MOST_TURNS} turns`);
  for (const [place, turn] of value.turns.entries()) checkTurn(turn, `${at}.turns[${place}]`);
}

function checkTurn(value, at) {
  need(isObject(value), at, "an object");
  need(isText(value.message), `${at}.message`, "a text");
  each(value.results, `${at}.results`, (found) => isObject(found) && ["id", "name", "content"].every((name) => isText(found[name])), "a result with id, name and content");
  const { answer } = value;
  if (answer === null) return;
  need(isObject(answer), `${at}.answer`, "an object or null");
  for (const name of ["rest", "thought", "told", "error"]) need(isText(answer[name]), `${at}.answer.${name}`, "a text");
  need(answer.seed === null || (isText(answer.seed) && /^-?[0-9]{1,19}$/.test(answer.seed)), `${at}.answer.seed`, "a seed or null");
  need(answer.times === null || isCounts(answer.times, 2), `${at}.answer.times`, "two numbers of microseconds or null");
  each(answer.calls, `${at}.answer.calls`, (found) => isObject(found) && ["id", "name", "arguments"].every((name) => isText(found[name])), "a call with id, name and arguments");
  each(answer.rounds, `${at}.answer.rounds`, isRound, `a round: ${NUMBERS.length} numbers, tokens, and 0 or 1`);
}

function isRound(found) {
  if (!Array.isArray(found) || found.length !== 3) return false;
  const [numbers, tokens, isThought] = found;
  const isToken = (token) => Array.isArray(token) && token.length === 3 && isText(token[0]) && isCount(token[1]) && token[1] < ORIGINS.length && isCount(token[2]);
  const fits = isCounts(numbers, NUMBERS.length) && numbers[NUMBERS.indexOf("draft_depth")] <= 4096;
  return fits && Array.isArray(tokens) && tokens.every(isToken) && [0, 1].includes(isThought);
}

function each(list, at, fits, what) {
  need(Array.isArray(list), at, "a list");
  const wrong = list.findIndex((found) => !fits(found));
  need(wrong < 0, `${at}[${wrong}]`, what);
}

function need(fits, at, what) {
  if (!fits) throw new Error(`${at} is not ${what}.`);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isText(value) {
  return typeof value === "string";
}

function isCounts(value, length) {
  return Array.isArray(value) && value.length === length && value.every(isCount);
}

function isCount(value) {
  return Number.isSafeInteger(value) && value >= 0;
}
