// A run's text, each token marked by its origin. Appends only; text of the model goes in as text, never as markup.

import { fillFacts } from "./facts.js";
import { visible } from "./format.js";
import { replaced } from "./trees.js";

export class Stream {
  // `facts` is the panel for what is chosen, `tip` the box for what is pointed at; both are shared by all streams.
  constructor(box, tip, facts) {
    this.box = box;
    this.tip = tip;
    this.facts = facts;
    this.tokens = new WeakMap();
    this.spans = [];
    this.clear(null, "");
    box.addEventListener("pointerover", (event) => this.point(event));
    box.addEventListener("pointerleave", () => tip.hide());
    box.addEventListener("click", (event) => this.pick(event));
    box.addEventListener("keydown", (event) => this.step(event));
    box.addEventListener("blur", () => tip.hide());
    box.addEventListener("scroll", () => tip.hide(), { passive: true });
  }

  clear(run, prompt) {
    this.run = run;
    this.spans = [];
    this.place = -1;
    this.here = null;
    this.shown = 0;
    this.ended = false;
    this.line = null;
    this.box.replaceChildren();
    if (!prompt) return;
    const asked = document.createElement("span");
    asked.className = "asked";
    asked.textContent = prompt;
    this.newLine().append(asked);
  }

  // Shows the rounds that have come since the last call, in one change of the page.
  draw() {
    const { run, box } = this;
    if (run === null) return;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    let before = this.spans.length;
    for (; this.shown < run.rounds.length; this.shown += 1) {
      const round = run.rounds[this.shown];
      for (const token of run.tokens.slice(before, before + round.tokens.length)) {
        // The guesses that were not kept stand before what the target said in their place.
        if (token.origin === "correction") this.strike(round);
        this.add(token);
      }
      before += round.tokens.length;
    }
    if (run.rest && !this.ended) this.line.append(run.rest);
    this.ended = this.ended || run.rest !== "";
    if (follows) box.scrollTop = box.scrollHeight;
  }

  add(token) {
    const span = document.createElement("span");
    span.className = `t ${token.origin}`;
    span.textContent = token.text;
    if (token.text === "") span.classList.add("part");
    if (/^\n+$/.test(token.text)) span.classList.add("line");
    this.tokens.set(span, this.spans.length);
    this.spans.push(span);
    (this.line ?? this.newLine()).append(span);
    // A paragraph is a block of its own, so that appending lays out one paragraph and not the whole answer.
    if (token.text.endsWith("\n")) this.newLine();
  }

  strike(round) {
    for (const guess of replaced(round)) {
      const struck = document.createElement("s");
      struck.className = "rejected";
      struck.textContent = visible(guess.text);
      (this.line ?? this.newLine()).append(struck);
    }
  }

  newLine() {
    this.line = document.createElement("div");
    this.box.append(this.line);
    return this.line;
  }

  point(event) {
    const index = this.tokens.get(event.target);
    if (event.pointerType === "touch" || index === undefined) this.tip.hide();
    else this.tip.show(this.run, this.run.tokens[index], event.target);
  }

  pick(event) {
    const index = this.tokens.get(event.target);
    if (index !== undefined) this.go(index);
  }

  step(event) {
    const last = this.spans.length - 1;
    const moves = { ArrowRight: this.place + 1, ArrowLeft: this.place - 1, ArrowDown: this.round(1), ArrowUp: this.round(-1), Home: 0, End: last };
    if (!(event.key in moves) || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(last, moves[event.key]));
    this.go(index);
    this.spans[index].scrollIntoView({ block: "nearest" });
    this.tip.show(this.run, this.run.tokens[index], this.spans[index]);
  }

  // First token of the round before or after the chosen token's.
  round(way) {
    const tokens = this.run?.tokens ?? [];
    const wanted = (tokens[this.place]?.round ?? -1) + way;
    const found = tokens.findIndex((token) => token.round === wanted);
    return found < 0 ? this.place : found;
  }

  go(index) {
    this.here?.classList.remove("here");
    this.place = index;
    this.here = this.spans[index];
    this.here.classList.add("here");
    fillFacts(this.facts, this.run, this.run.tokens[index]);
    this.facts.hidden = false;
  }
}
