// What is asked for: the prompt, or the next message of the conversation, which may take the place of an earlier one.

import { Conversation } from "./conversation.js";
import { Thread } from "./thread.js";

const at = (id) => document.getElementById(id);

export class Composer {
  constructor(tip, facts) {
    this.conversation = new Conversation();
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

  // What the next request is about, and null where nothing is said yet. A race without a new message runs the last again.
  asked(view, races) {
    const { conversation } = this;
    if (view === "completion") return this.preview(view);
    const message = at("message").value.trim();
    const last = conversation.turns.at(-1);
    if (message !== "") conversation.say(message);
    else if (!races || !conversation.again()) {
      at("message").focus();
      return null;
    }
    const seed = message === "" ? last.run.opened.seed : null;
    this.write("");
    return { messages: conversation.messages(at("system").value.trim()), ...(seed === null ? {} : { seed }) };
  }

  // The same without saying it.
  preview(view, message = at("message").value.trim()) {
    if (view === "completion") return { prompt: at("prompt").value };
    if (message !== "" || this.conversation.turns.length > 0) return { messages: this.conversation.messages(at("system").value.trim(), message) };
    at("message").focus();
    return null;
  }

  // Takes what came of the last request; whether there is anything to show of it.
  take(run) {
    const unsaid = this.conversation.take(run);
    if (unsaid && at("message").value === "") at("message").value = unsaid;
    this.draw();
    return this.conversation.current !== null;
  }

  edit(turn) {
    if (at("stop-turn").ariaDisabled === "false") return;
    this.conversation.editing = turn;
    this.write(turn.message);
    this.draw();
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

  render(rendered) {
    this.thread.render(rendered);
  }

  draw() {
    this.thread.draw();
    const number = this.thread.dim();
    at("editing").hidden = number === null;
    at("edited").textContent = String(number);
  }

  write(message) {
    at("message").value = message;
    at("message").focus();
  }
}
