// The guesses of a round as a tree: what was kept, what was not, and what was not looked at.

import { name, plural, visible } from "./format.js";

const SIGNS = { accepted: "●", rejected: "×", skipped: "○" };
const STATES = { accepted: "kept", rejected: "not kept", skipped: "not looked at" };

// All guesses that are reported, in the order of their rows, each with its state.
export function guesses(round) {
  const kept = round.tokens.filter((token) => token.row !== null).map((token) => ({ ...token, state: "accepted" }));
  const lost = new Set(round.rejected.map((guess) => guess.row));
  const last = kept.at(-1)?.row ?? 0;
  // Where the last kept guess ended the answer, nothing after it was looked at.
  const ended = round.evaluated_count === round.accepted_count;
  const skipped = (guess) => lost.has(guess.parent) || (ended && guess.parent === last);
  const others = round.rejected.map((guess) => ({ ...guess, state: skipped(guess) ? "skipped" : "rejected" }));
  return [...kept, ...others].sort((one, other) => one.row - other.row);
}

export function isTree(round) {
  return guesses(round).some((guess) => guess.parent !== guess.row - 1);
}

export function signs(round) {
  return guesses(round).map((guess) => SIGNS[guess.state]).join("");
}

// The guesses in whose place the target said something else: of a tree those side by side there, of a chain all after it.
export function replaced(round) {
  const last = round.tokens.findLast((token) => token.row !== null)?.row ?? 0;
  return round.isTree ? round.rejected.filter((guess) => guess.parent === last) : round.rejected;
}

// A list in lists, so that it is read as it is seen. It scrolls within itself, by keyboard too.
export function drawTree(round) {
  const all = guesses(round);
  const rows = new Set([0, ...all.map((guess) => guess.row)]);
  const last = all.findLast((guess) => guess.state === "accepted")?.row ?? 0;
  const below = new Map();
  for (const guess of all) {
    // Tokens that were kept after a stop string are not reported; what hung on them hangs on the last that is.
    const parent = rows.has(guess.parent) ? guess.parent : last;
    below.set(parent, [...(below.get(parent) ?? []), guess]);
  }
  const own = round.tokens.at(-1);
  if (own.row === null) below.set(last, [...(below.get(last) ?? []), own]);
  const box = made("div", "tree");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `${plural(all.length, "guess")} of round ${round.index} as a tree`);
  const [list, root] = [made("ul", ""), made("li", "")];
  root.append(made("span", "guess", "•"), level(below, 0));
  list.append(root);
  box.append(list);
  return box;
}

function level(below, row) {
  const list = made("ul", "");
  for (const guess of below.get(row) ?? []) {
    const entry = made("li", guess.state ?? guess.origin);
    entry.append(guess.state ? guessed(guess) : said(guess));
    if (guess.state && below.has(guess.row)) entry.append(level(below, guess.row));
    list.append(entry);
  }
  return list;
}

function guessed(guess) {
  const box = made("span", "guess");
  const value = guess.value === null ? "" : ` ${guess.value.toFixed(2)}`;
  const estimate = guess.value === null ? "" : `, which gave it a chance of ${guess.value.toFixed(4)}`;
  box.title = `Row ${guess.row}, ${STATES[guess.state]}: guessed by ${name(guess.drafter)}${estimate}`;
  const sign = made("span", "pips", SIGNS[guess.state]);
  sign.setAttribute("role", "img");
  sign.setAttribute("aria-label", STATES[guess.state]);
  const [tag, className] = { accepted: ["span", "t accepted"], rejected: ["s", "rejected"], skipped: ["span", "skipped"] }[guess.state];
  box.append(sign, made(tag, className, visible(guess.text)), made("small", "", name(guess.drafter) + value));
  return box;
}

function said(token) {
  const box = made("span", "guess");
  box.append(made("span", `t ${token.origin}`, visible(token.text)), made("small", "", "target"));
  return box;
}

export function made(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}
