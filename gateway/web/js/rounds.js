// The rounds view: one row a pass of the target, as in Figure 1 of Leviathan et al. (2023).

import { AHEAD, count, guesser, plural, time, visible, why } from "./format.js";
import { Seen } from "./painter.js";
import { parts } from "./run.js";
import { drawTree, made, replaced, signs } from "./trees.js";
import { whyButton } from "./why.js";

const MOST_ROWS = 400;

export class RoundsView {
  // `trees` is the choice whether trees are open, which is there once there is one.
  constructor(list, note, trees) {
    this.list = list;
    this.note = note;
    this.trees = trees;
    this.open = trees.querySelector("input");
    this.open.addEventListener("change", () => {
      for (const each of list.querySelectorAll("details")) each.open = this.open.checked;
    });
    this.seen = new Seen(list);
    this.clear(null);
  }

  clear(run) {
    this.run = run;
    this.shown = 0;
    this.list.replaceChildren();
    this.note.hidden = true;
    this.trees.hidden = true;
  }

  // While rounds come they are shown to a user who looks, and in the end to everybody.
  draw(ended) {
    const { run, list } = this;
    if (run === null || this.shown === run.rounds.length || !(ended || this.seen.now)) return;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 48;
    // A burst of more rows than are kept is never made.
    this.shown = Math.max(this.shown, run.rounds.length - MOST_ROWS);
    const rows = document.createDocumentFragment();
    for (; this.shown < run.rounds.length; this.shown += 1) rows.append(this.row(run.rounds[this.shown]));
    list.append(rows);
    while (list.childElementCount > MOST_ROWS) list.firstElementChild.remove();
    this.note.hidden = run.rounds.length <= MOST_ROWS;
    this.note.textContent = `The newest ${count(MOST_ROWS)} of ${count(run.rounds.length)} passes; the trace has all of them.`;
    if (follows) list.scrollTop = list.scrollHeight;
  }

  row(round) {
    const row = document.createElement("li");
    const choice = this.run.choices[round.index];
    row.append(
      choice === null ? made("span", "number", round.index === 0 ? "prompt" : count(round.index)) : whyButton(round, choice, row),
      pips(round),
      said(round),
      this.bar(round),
      made("span", "took", time(round.round_us)),
    );
    if (round.isTree) row.append(this.tree(round));
    return row;
  }

  // A tree is drawn when somebody opens it.
  tree(round) {
    const box = made("details", "");
    box.append(made("summary", "", `Tree of ${plural(round.draft_count, "guess")}, ${count(round.draft_depth)} deep`));
    box.addEventListener("toggle", () => box.childElementCount > 1 || box.append(drawTree(round)));
    box.open = this.open.checked;
    this.trees.hidden = false;
    return box;
  }

  // Its whole width is twice a mean round, so that one long round does not make all others small.
  bar(round) {
    const all = parts(round);
    const { draft, verify, wire } = this.run.times;
    const mean = this.run.passes ? (draft + verify + wire) / this.run.passes : round.round_us;
    const scale = 50 / Math.max(mean, 1);
    const bar = made("span", "stack", "");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `draft ${time(all.draft)}, target ${time(all.verify)}, wire and queue ${time(all.wire)}`);
    bar.title = bar.getAttribute("aria-label");
    bar.classList.toggle("cut", round.round_us * scale > 100);
    for (const [name, us] of Object.entries(all)) {
      const part = made("i", name, "");
      part.style.width = `${(us * scale).toFixed(2)}%`;
      bar.append(part);
    }
    return bar;
  }
}

function pips(round) {
  const lost = Math.max(0, round.evaluated_count - round.accepted_count);
  const unseen = Math.max(0, round.draft_count - round.accepted_count - lost);
  const counted = "●".repeat(round.accepted_count) + "×".repeat(lost) + "○".repeat(unseen);
  const shown = made("span", "pips", round.isTree ? signs(round) : counted);
  if (round.draft_count === 0) return made("span", "pips why", "–");
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", `${round.accepted_count} of ${round.draft_count} guesses kept`);
  return shown;
}

function said(round) {
  const box = made("span", "said", "");
  const own = round.tokens.filter((token) => token.origin !== "accepted");
  for (const token of round.tokens.filter((each) => each.origin === "accepted")) {
    const span = made("span", "t accepted", visible(token.text));
    if (token.row !== null && token.drafter) span.title = `guessed by ${guesser(token.drafter)}`;
    box.append(span);
  }
  for (const guess of replaced(round)) box.append(made("s", "rejected", visible(guess.text)));
  for (const token of own) box.append(made("span", `t ${token.origin}`, visible(token.text)));
  const reason = why(round.fallback_reason) || AHEAD[round.branches];
  if (reason) box.append(made("span", "why", ` ${reason}`));
  return box;
}
