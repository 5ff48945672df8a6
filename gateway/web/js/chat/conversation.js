// The turns of a conversation, and what the next request says of them. Touches no page.

export class Conversation {
  constructor() {
    this.clear();
  }

  // A turn is a message, or results of the calls before it, or both, and the run that answers them; `current` is the one
  // whose answer is under way or the newest. The id is that of the kept conversation.
  clear() {
    this.id = newId();
    this.title = "";
    this.turns = [];
    this.current = null;
    this.editing = null;
  }

  // Becomes a kept one, with all its turns.
  become({ id, title, turns }) {
    Object.assign(this, { id, title, turns, editing: null, current: turns.at(-1)?.run ? turns.at(-1) : null });
  }

  // The turns that the next message stands after.
  get before() {
    return this.editing === null ? this.turns : this.turns.slice(0, this.turns.indexOf(this.editing));
  }

  // Begins a turn. One that is edited goes, and what came after it.
  say(message, results) {
    this.unsaid = { turns: this.turns, editing: this.editing };
    this.current = { message, results, run: null };
    this.turns = [...this.before, this.current];
    this.editing = null;
  }

  // Begins the last turn again, whose answer stays until there is another; whether there is one.
  again() {
    this.editing = null;
    this.current = this.turns.at(-1) ?? null;
    return this.current !== null;
  }

  // Takes what came of the current turn. If nothing did, all is as it was before, and a turn that was never said is
  // returned. An answer that was whole stays where another one in its place broke off.
  take(run) {
    const { current } = this;
    const isSaid = run.text || run.completion || run.calls.length > 0;
    if (isSaid && !(run.error && current.run && !current.run.error)) {
      current.run = run;
      return null;
    }
    this.current = null;
    if (current.run !== null) return null;
    Object.assign(this, this.unsaid);
    return current;
  }

  // What a request says: all turns and the next one, or up to the last message where there is no next one.
  messages(system, next = null) {
    const said = system ? [{ role: "system", content: system }] : [];
    const turns = next === null ? this.turns : [...this.before, next];
    for (const turn of turns) {
      for (const { id, content } of turn.results) said.push({ role: "tool", tool_call_id: id, content });
      if (turn.message) said.push({ role: "user", content: turn.message });
      if (turn !== turns.at(-1)) said.push(answered(turn.run));
    }
    return said;
  }
}

// Where the page is not secure, the browser makes no UUIDs.
export function newId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(16).padStart(8, "0")).join("");
}

function answered(run) {
  const calls = (run?.calls ?? []).map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role: "assistant", content: run?.text ?? "", ...(calls.length > 0 ? { tool_calls: calls } : {}) };
}
