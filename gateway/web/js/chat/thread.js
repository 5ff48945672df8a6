// The conversation as it is seen: messages, and the answers before the newest, each with marks and facts as that one.

import { flash, toClipboard } from "../copying.js";
import { Stream } from "../stream.js";
import { made } from "../trees.js";

const OPENERS = {
  Explain: "Why is the sky blue? Explain it to a child.",
  Tips: "Give me five tips for sleeping better, each in one sentence.",
  Code: "Write a Python function that tells whether a word is a palindrome, with an example of its use.",
  Poem: "Write a short poem about the sea, with a refrain after every verse.",
};

export class Thread {
  // `edit` is called with the turn that somebody wants to change, `open` with a message to begin with.
  constructor(list, openers, conversation, { tip, facts, edit, open }) {
    Object.assign(this, { list, openers, conversation, tip, facts, edit, rendered: true });
    for (const [name, message] of Object.entries(OPENERS)) openers.querySelector(".presets").append(button(name, () => open(message)));
  }

  // Shows the turns as they are now; the current turn's answer stands elsewhere.
  draw() {
    const { turns, current } = this.conversation;
    this.openers.hidden = turns.length > 0;
    while (this.list.childElementCount > turns.length) this.list.lastElementChild.remove();
    for (const [place, turn] of turns.entries()) {
      const run = turn === current ? null : turn.run;
      const shown = this.list.children[place];
      if (shown?.turn === turn && shown.run === run) continue;
      const entry = this.entry(turn, run, place + 1);
      if (shown) shown.replaceWith(entry);
      else this.list.append(entry);
    }
  }

  // Shows the answers as Markdown or token by token.
  render(rendered) {
    this.rendered = rendered;
    this.list.replaceChildren();
    this.draw();
  }

  // Shows which turns go if the message that is edited is sent.
  dim() {
    const { turns, editing } = this.conversation;
    const from = editing === null ? turns.length : turns.indexOf(editing);
    for (const [place, entry] of [...this.list.children].entries()) entry.classList.toggle("going", place >= from);
    return from < turns.length ? from + 1 : null;
  }

  entry(turn, run, number) {
    const entry = Object.assign(made("li", "turn"), { turn, run });
    const asked = made("article", "asked-turn");
    asked.setAttribute("aria-label", `Message ${number}`);
    asked.append(head("You", button("Edit", () => this.edit(turn), `Edit message ${number}`)));
    for (const { name, content } of turn.results) asked.append(made("p", "said-result", `Result of ${name}: ${content}`));
    if (turn.message) asked.append(made("p", "message", turn.message));
    entry.append(asked);
    if (run !== null) entry.append(this.answer(run, number));
    return entry;
  }

  answer(run, number) {
    const box = made("article", "answer-turn");
    const text = made("div", "stream");
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Answer ${number}, token by token`);
    box.setAttribute("aria-label", `Answer ${number}`);
    const copy = button("Copy", async () => flash(copy, (await toClipboard(run.text)) ? "Copied" : "Not copied"), `Copy answer ${number}`);
    box.append(head("Assistant", copy), text);
    const stream = new Stream(text, this.tip, this.facts);
    stream.clear(run, "", this.rendered);
    stream.draw();
    if (run.error) box.append(made("p", "hint", `Broke off: ${run.error.message}`));
    return box;
  }
}

function head(who, act) {
  const box = made("div", "by");
  box.append(made("span", "", who), act);
  return box;
}

function button(text, act, label = text) {
  const found = made("button", "small", text);
  found.type = "button";
  if (label !== text) found.setAttribute("aria-label", label);
  found.addEventListener("click", act);
  return found;
}
