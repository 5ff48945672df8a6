// The list of kept conversations: opens, renames, deletes, exports and imports them.

import { flash, save } from "../copying.js";
import { plural } from "../format.js";
import { made } from "../trees.js";
import { newId } from "./conversation.js";
import { file, recordOf, recordsIn, turnsOf, VERSION } from "./record.js";
import { MOST_CHARS, NotKept, Store } from "./store.js";

// Which conversation this tab shows, so that loading the page again shows it too.
const SHOWN = "outrider-conversation";
const DAY = { month: "short", day: "numeric" };
const [TIME, DATE] = [{ ...DAY, hour: "2-digit", minute: "2-digit", hourCycle: "h23" }, { ...DAY, year: "numeric" }].map((form) => new Intl.DateTimeFormat("en", form));
const at = (id) => document.getElementById(id);

export class Library {
  // `open` is called with a conversation to go on with, `gone` when the one that is shown was deleted.
  constructor(conversation, { open, gone }) {
    Object.assign(this, { conversation, open, gone, store: new Store(), heads: [] });
    at("export").addEventListener("click", () => this.guarded(() => this.exportAll()));
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", (event) => this.guarded(() => this.take(event.target)));
    document.addEventListener("visibilitychange", () => document.hidden || this.draw());
    this.draw();
    const [visit] = performance.getEntriesByType("navigation");
    this.left = visit?.type === "reload" ? sessionStorage.getItem(SHOWN) : null;
  }

  // Shows the conversation that this tab had before the page was loaded again, once the form is filled in.
  restore() {
    const { left } = this;
    this.left = null;
    if (left !== null) this.guarded(() => this.show(left, true));
  }

  // Does what may fail, and says what failed.
  async guarded(act) {
    at("library-failure").hidden = true;
    try {
      await act();
    } catch (error) {
      at("library-failure").textContent = error.message;
      at("library-failure").hidden = false;
      at("library").open = true;
    }
  }

  // Keeps the conversation as it is now; `live` is the run that answers its current turn.
  keep(system, live = null) {
    if (this.conversation.turns.length === 0) return;
    const record = recordOf(this.conversation, system, live);
    sessionStorage.setItem(SHOWN, record.id);
    this.guarded(async () => {
      await this.store.put([record]);
      await this.draw();
    });
  }

  // No kept conversation is shown any more.
  leave() {
    sessionStorage.removeItem(SHOWN);
    this.mark();
  }

  async show(id, isFirst = false) {
    const record = await this.store.get(id);
    if (record === undefined) {
      await this.draw();
      if (isFirst) return;
      throw new NotKept("This conversation was deleted in another tab.");
    }
    if (record.version !== VERSION) throw new NotKept("This conversation was kept by another version of the page, which this one cannot read.");
    await this.open({ ...record, turns: turnsOf(record) });
    sessionStorage.setItem(SHOWN, id);
    this.mark();
  }

  async draw() {
    try {
      this.heads = await this.store.list();
    } catch (error) {
      at("library-empty").textContent = error.message;
    }
    at("library-count").textContent = this.heads.length > 0 ? `(${this.heads.length})` : "";
    at("library-empty").hidden = this.heads.length > 0;
    at("export").ariaDisabled = String(this.heads.length === 0);
    const focused = document.activeElement?.dataset?.act;
    at("conversations").replaceChildren(...this.heads.map((head) => this.entry(head)));
    if (focused) at("conversations").querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
    this.mark();
  }

  mark() {
    for (const entry of at("conversations").children) {
      const title = entry.querySelector(".title");
      if (entry.dataset.id === this.conversation.id) title.setAttribute("aria-current", "true");
      else title.removeAttribute("aria-current");
    }
  }

  entry(head) {
    const entry = made("li", "");
    entry.dataset.id = head.id;
    const button = (name, text, act) => {
      const found = Object.assign(made("button", name === "open" ? "title" : "small", text), { type: "button" });
      if (name !== "open") found.setAttribute("aria-label", `${text} “${head.title}”`);
      found.dataset.act = `${name} ${head.id}`;
      found.addEventListener("click", () => this.guarded(act));
      return found;
    };
    const changed = new Date(head.changed);
    const time = made("time", "", (changed.getFullYear() === new Date().getFullYear() ? TIME : DATE).format(changed));
    time.dateTime = head.changed;
    time.title = plural(head.turns, "turn");
    const line = made("div", "line");
    line.append(
      time,
      button("rename", "Rename", () => this.rename(head)),
      button("export", "Export", async () => save("outrider-conversation.json", file([await this.store.get(head.id)]))),
      button("delete", "Delete", () => this.remove(head)),
    );
    entry.append(button("open", head.title, () => this.show(head.id)), line);
    return entry;
  }

  async rename(head) {
    at("title").value = head.title;
    const said = answer(at("rename-dialog"));
    at("title").select();
    if ((await said) !== "enter") return;
    const record = await this.store.get(head.id);
    const title = at("title").value.trim() || head.title;
    if (record !== undefined) await this.store.put([{ ...record, title }]);
    if (head.id === this.conversation.id) this.conversation.title = title;
    await this.draw();
  }

  async remove(head) {
    at("delete-name").textContent = head.title;
    if ((await answer(at("delete-dialog"))) !== "enter") return;
    // What runs ends first, and would be kept once more.
    if (head.id === this.conversation.id) await this.gone();
    await this.store.delete(head.id);
    await this.draw();
    at("library").querySelector("summary").focus();
    this.say(`“${head.title}” is deleted.`);
  }

  async exportAll() {
    if (at("export").ariaDisabled === "true") return;
    save("outrider-conversations.json", file(await this.store.all()));
    flash(at("export"), "Exported");
  }

  // All conversations of a file, or none and why. One that is here as it is in the file does not come twice; one that has
  // changed since comes beside it.
  async take(field) {
    const [chosen] = field.files;
    try {
      if (chosen.size > 4 * MOST_CHARS) throw new NotKept(`The file is larger than ${(4 * MOST_CHARS) / 1e6} megabytes.`);
      const records = recordsIn(await chosen.text());
      const here = new Map((await this.store.list()).map((head) => [head.id, head.changed]));
      const fresh = records.filter(({ id, changed }) => here.get(id) !== changed).map((record) => (here.has(record.id) ? { ...record, id: newId() } : record));
      await this.store.put(fresh);
      const twice = records.length - fresh.length;
      await this.draw();
      this.say(`${plural(fresh.length, "conversation")} imported${twice ? `, ${twice} already here` : ""}.`);
    } finally {
      field.value = ""; // So that the same file can be chosen again.
    }
  }

  say(text) {
    at("library-said").textContent = text;
    at("library-said").hidden = false;
  }
}

// What a dialog is closed with.
function answer(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
