// A run's text, token by token or as Markdown, each token marked by its origin. Text of the model goes in as text, never
// as markup of the page.

import { fillFacts } from "./facts.js";
import { visible } from "./format.js";
import { Rendered } from "./text/rendered.js";
import { made, replaced } from "./trees.js";

export class Stream {
  // `facts` is the panel for what is chosen, `tip` the box for what is pointed at; both are shared by all streams.
  constructor(box, tip, facts) {
    this.box = box;
    // Which of them scrolls is the view's choice.
    this.scrollers = [box, box.closest(".thread")].filter((each) => each !== null);
    this.tip = tip;
    this.facts = facts;
    this.tokens = new WeakMap();
    this.spans = [];
    this.clear(null);
    box.addEventListener("pointerover", (event) => this.point(event));
    box.addEventListener("pointerleave", () => tip.hide());
    box.addEventListener("click", (event) => this.pick(event));
    box.addEventListener("keydown", (event) => this.step(event));
    box.addEventListener("blur", () => tip.hide());
    box.addEventListener("scroll", () => tip.hide(), { passive: true });
  }

  clear(run, prompt = "", rendered = false) {
    this.run = run;
    this.spans = [];
    this.place = -1;
    this.here = null;
    this.shown = 0;
    this.ended = false;
    this.line = null;
    this.thought?.remove();
    this.thought = null;
    this.calls?.remove();
    this.calls = null;
    this.box.replaceChildren();
    this.box.classList.toggle("rendered", rendered);
    this.layout = rendered ? new Rendered(this.box, (...piece) => this.addPiece(...piece), (index) => this.forget(index)) : null;
    if (prompt) this.newLine().append(made("span", "asked", prompt));
  }

  // Shows the rounds that have come since the last call, in one change of the page.
  draw() {
    const { run } = this;
    if (run === null || this.ended) return;
    const following = this.scrollers.filter((each) => each.scrollHeight - each.scrollTop - each.clientHeight < 48);
    this.drawThought();
    if (this.layout !== null) this.drawRendered();
    else this.append();
    this.drawCalls();
    this.ended = run.ended;
    for (const each of following) each.scrollTop = each.scrollHeight;
  }

  // What the model thought before it answered, folded up above the answer.
  drawThought() {
    const { thought } = this.run;
    if (thought === "") return;
    if (this.thought === null) {
      this.thought = made("details", "thought");
      this.thought.append(made("summary", "", "Reasoning"), made("p", ""));
      this.box.before(this.thought);
    }
    this.thought.lastElementChild.textContent = thought;
  }

  // Calls of tools, below the answer: nobody makes them but the user.
  drawCalls() {
    const { calls } = this.run;
    if (calls.length === 0) return;
    if (this.calls === null) this.box.after(this.calls = made("div", "calls"));
    while (this.calls.childElementCount < calls.length) {
      const box = this.calls.appendChild(made("div", "call"));
      box.append(made("span", "", "Calls "), made("b", "", calls[this.calls.childElementCount - 1].name), made("pre", ""));
      box.lastElementChild.tabIndex = 0;
    }
    for (const [place, { arguments: text }] of calls.entries()) this.calls.children[place].lastElementChild.textContent = text;
  }

  drawRendered() {
    if (this.shown === this.run.rounds.length && !this.run.ended) return;
    this.shown = this.run.rounds.length;
    this.layout.draw(this.run);
  }

  append() {
    const { run } = this;
    let before = this.spans.length;
    for (; this.shown < run.rounds.length; this.shown += 1) {
      const count = run.rounds[this.shown].tokens.length;
      for (const token of run.tokens.slice(before, before + count)) this.add(token);
      before += count;
    }
    if (run.rest) (this.line ?? this.newLine()).append(run.rest);
  }

  add(token) {
    const line = this.line ?? this.newLine();
    const span = this.span(line, this.spans.length, token.text);
    // Tokens of reasoning stand elsewhere.
    if (token.text === "" && !this.run.rounds[token.round].reasoning) span.classList.add("part");
    if (/^\n+$/.test(token.text)) span.classList.add("line");
    this.spans.push(span);
    // A paragraph is a block of its own, so that appending lays out one paragraph and not the whole answer.
    if (token.text.endsWith("\n")) this.newLine();
  }

  // A part of a token, or all of it. Marks of Markdown are not shown, so there are tokens without any.
  addPiece(box, index, text) {
    const isFirst = this.spans[index] === undefined;
    const span = this.span(box, index, text, isFirst);
    if (isFirst) this.spans[index] = span;
  }

  forget(index) {
    this.spans.length = Math.min(this.spans.length, index);
  }

  span(box, index, text, isFirst = true) {
    const token = this.run.tokens[index];
    // The guesses that were not kept stand before what the target said in their place.
    if (token.origin === "correction" && isFirst) {
      for (const guess of replaced(this.run.rounds[token.round])) box.append(made("s", "rejected", visible(guess.text)));
    }
    const span = box.appendChild(made("span", `t ${token.origin}`, text));
    this.tokens.set(span, index);
    return span;
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
    if (event.target !== this.box || !(event.key in moves) || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const wanted = Math.max(0, Math.min(last, moves[event.key]));
    const index = this.seen(wanted, wanted < this.place || event.key === "End" ? -1 : 1);
    if (index === null) return;
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

  // The next token from a place that is shown; the last one that way, where all after it are hidden.
  seen(from, way) {
    for (const step of [way, -way]) {
      for (let index = from; index >= 0 && index < this.spans.length; index += step) if (this.spans[index]) return index;
    }
    return null;
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
