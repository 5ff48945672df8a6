// The turns of a conversation, and what the next request says of them. Touches no page.

export class Conversation {
  constructor() {
    this.clear();
  }

  // A turn is a message and the run that answers it; `current` is the one whose answer is under way or the newest.
  clear() {
    this.turns = [];
    this.current = null;
    this.editing = null;
  }

  // Begins a turn. One that is edited goes, and what came after it.
  say(message) {
    if (this.editing !== null) this.turns.splice(this.turns.indexOf(this.editing));
    this.editing = null;
    this.current = { message, run: null };
    this.turns.push(this.current);
  }

  // Begins the last turn again, whose answer stays until there is another; whether there is one.
  again() {
    this.current = this.turns.at(-1) ?? null;
    return this.current !== null;
  }

  // Takes what came of the current turn. Without a word the turn is as before, and a new one was never said: then this
  // gives its message back.
  take(run) {
    const { current } = this;
    if (run.text || run.completion) {
      current.run = run;
      return "";
    }
    this.current = null;
    if (current.run !== null) return "";
    this.turns.pop();
    return current.message;
  }

  // What a request says: all turns and the next message, or up to the last message where there is no next one.
  messages(system, next = "") {
    const said = system ? [{ role: "system", content: system }] : [];
    const kept = next && this.editing !== null ? this.turns.slice(0, this.turns.indexOf(this.editing)) : this.turns;
    for (const turn of kept) {
      said.push({ role: "user", content: turn.message });
      if (next || turn !== kept.at(-1)) said.push({ role: "assistant", content: turn.run?.text ?? "" });
    }
    return next ? [...said, { role: "user", content: next }] : said;
  }
}
