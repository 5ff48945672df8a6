// What is known about one token, as rows of name and value, and where that is shown.

import { AHEAD, MEANINGS, guesser, probability, time, visible } from "./format.js";

function rows(run, token) {
  const round = run.rounds[token.round];
  const guessed = token.row !== null;
  const drafter = guessed ? token.drafter : round.drafter;
  const choice = run.choices[token.round];
  const pass = token.round === 0 ? "the prompt's pass" : `${token.round}, ${round.accepted_count} of ${round.draft_count} guesses kept`;
  const found = [
    ["Token", `${visible(token.text)} (id ${token.token_id})`],
    ["Origin", MEANINGS[token.origin]],
    ["Round", pass],
    ...(choice === null ? [] : [["Why so many", choice.reason]]),
    ["Position", String(token.position)],
    ["Target probability", probability(token.logprob) ?? "not asked for"],
    ["Draft probability", probability(token.draft_logprob) ?? (token.origin === "accepted" ? "not told" : "none: not its guess")],
    ["Time", `${time(round.time_us)} after the request`],
    ["Round took", time(round.round_us)],
    ...(AHEAD[round.branches] ? [["Run-ahead", AHEAD[round.branches]]] : []),
    ...(round.draft_count > 0 && drafter ? [[guessed ? "Guessed by" : "Guesses by", guesser(drafter)]] : []),
    ...(guessed && token.value !== null ? [["Drafter's estimate", token.value.toFixed(4)]] : []),
  ];
  return token.text === "" ? [...found, ["Text", "part of a character, or of a stop string"]] : found;
}

export function fillFacts(list, run, token) {
  const children = [];
  for (const [name, value] of rows(run, token)) {
    const term = document.createElement("dt");
    const detail = document.createElement("dd");
    term.textContent = name;
    detail.textContent = value;
    children.push(term, detail);
  }
  list.replaceChildren(...children);
}

// The box beside the pointer or the keyboard's place. The panel below the answer says the same to everybody else.
export class Tip {
  constructor(box) {
    this.box = box;
    this.list = box.querySelector("dl");
  }

  show(run, token, element) {
    fillFacts(this.list, run, token);
    this.box.hidden = false;
    const [line] = element.getClientRects();
    const at = line ?? element.getBoundingClientRect();
    const size = this.box.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, window.innerWidth - size.width - 8));
    const below = at.bottom + 8;
    const top = below + size.height < window.innerHeight ? below : Math.max(8, at.top - size.height - 8);
    this.box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  hide() {
    this.box.hidden = true;
  }
}
