// What is asked for: the prompt, or the next message of the conversation, which may take the place of an earlier one.

import { made } from "../trees.js";
import { Conversation } from "./conversation.js";
import { Thread } from "./thread.js";

const at = (id) => document.getElementById(id);

export class Composer {
  constructor(tip, facts) {
    this.conversation = new Conversation();
    // Whether the message that is written was refused before.
    this.isBack = false;
    const acts = { tip, facts, edit: (turn) => this.edit(turn), open: (message) => this.write(message) };
    this.thread = new Thread(at("turns"), at("openers"), this.conversation, acts);
    this.thread.draw();
    at("edit-cancel").addEventListener("click", () => this.cancel());
  }

  get lastMessage() {
    return this.conversation.turns.at(-1)?.message ?? "";
  }

  get runs() {
    return this.conversation.turns.map((turn) => turn.run).filter((run) => run !== null);
  }

  get system() {
    return at("system").value.trim();
  }

  // What is written, as a turn; null where nothing is.
  get written() {
    const message = at("message").value.trim();
    const results = [...at("call-results").querySelectorAll("textarea")]
      .map((field) => ({ ...field.call, content: field.value.trim() })).filter(({ content }) => content !== "");
    return message === "" && results.length === 0 ? null : { message, results };
  }

  // What the next request is about, and null where nothing is said yet. A race without a new message runs the last again.
  asked(view, races) {
    const { conversation, written } = this;
    if (view === "completion") return this.preview(view);
    if (written === null) {
      if (races && conversation.turns.length > 0) return this.again(conversation.turns.at(-1).run?.opened?.seed ?? null);
      at("message").focus();
      return null;
    }
    conversation.say(written.message, written.results);
    this.isBack = false;
    this.write("");
    return { messages: conversation.messages(this.system) };
  }

  // Asks for the last answer again, from a seed, or without one from a new one; null where there is no message yet.
  again(seed) {
    if (!this.conversation.again()) return null;
    return { messages: this.conversation.messages(this.system), seed: seed ?? undefined };
  }

  // The same without saying it.
  preview(view) {
    if (view === "completion") return { prompt: at("prompt").value };
    if (this.written !== null || this.conversation.turns.length > 0) return { messages: this.conversation.messages(this.system, this.written) };
    at("message").focus();
    return null;
  }

  // Takes what came of the last request; whether there is anything to show of it.
  take(run) {
    const unsaid = this.conversation.take(run);
    this.draw();
    this.isBack = unsaid !== null && this.written === null;
    if (this.isBack) this.restore(unsaid);
    return this.conversation.current !== null;
  }

  edit(turn) {
    if (at("stop-turn").ariaDisabled === "false") return;
    this.conversation.editing = turn;
    this.draw();
    this.restore(turn);
    at("message").focus();
  }

  // Puts a turn back to where it was written.
  restore({ message, results }) {
    at("message").value = message;
    for (const field of at("call-results").querySelectorAll("textarea")) field.value = results.find(({ id }) => id === field.call.id)?.content ?? "";
  }

  cancel() {
    if (this.conversation.editing === null) return;
    this.conversation.editing = null;
    this.write("");
    this.draw();
  }

  forget() {
    this.conversation.clear();
    this.write("");
    this.draw();
  }

  // Goes on with a kept conversation.
  become(kept) {
    this.conversation.become(kept);
    at("system").value = kept.system;
    this.write("");
    this.draw();
  }

  render(rendered) {
    this.thread.render(rendered);
  }

  draw() {
    this.thread.draw();
    const number = this.thread.dim();
    at("editing").hidden = number === null;
    at("edited").textContent = String(number);
    this.drawResults();
  }

  // A field for the result of each call in the answer before; the page calls nothing itself.
  drawResults() {
    const box = at("call-results");
    const calls = this.conversation.before.at(-1)?.run?.calls ?? [];
    box.hidden = calls.length === 0;
    if (String(calls.map(({ id }) => id)) === box.dataset.calls) return;
    box.dataset.calls = String(calls.map(({ id }) => id));
    box.replaceChildren(...calls.map(({ id, name, arguments: text }) => {
      const label = made("label", "", `Result of ${name}(${text})`);
      const field = label.appendChild(Object.assign(made("textarea", ""), { rows: 2, call: { id, name } }));
      field.spellcheck = false;
      return label;
    }));
  }

  write(message) {
    at("message").value = message;
    at("message").focus();
  }
}
