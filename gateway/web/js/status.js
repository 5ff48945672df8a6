// Who is there. Asks now and then while the page is seen, and says it plainly when the draft is gone.

import { percent, plural } from "./format.js";

const PAUSE_MS = 2000;

export class Status {
  // `told` is called with every answer of the gateway, and with null where none came.
  constructor(gateway, list, banner, told) {
    this.gateway = gateway;
    this.list = list;
    this.banner = banner;
    this.told = told;
    this.now = null;
    this.refused = false;
    this.asking = false;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    this.ask();
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    clearTimeout(this.timer);
    try {
      const response = await this.gateway.call("page/status", { cache: "no-store", timeoutMs: 5000 });
      this.refused = response.status === 401;
      this.now = response.ok ? await response.json() : null;
    } catch {
      this.refused = false;
      this.now = null; // No gateway, no answer: that is what is shown.
    }
    this.show();
    this.told(this.now);
    this.asking = false;
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), PAUSE_MS);
  }

  show() {
    const { now } = this;
    if (now === null) {
      for (const name of ["gateway", "target", "draft"]) this.service(name, name === "gateway" ? false : null, name === "gateway" ? "away" : "unknown", "");
      this.service("policy", null, "unknown", "");
      this.tell(this.refused ? "The gateway answers nobody without a key. Generate something to be asked for yours." : "The gateway does not answer. The page asks again every two seconds.");
      return;
    }
    const { gateway, target, draft, policy } = now;
    this.service("gateway", true, "up", `${gateway.running} running, ${gateway.waiting} waiting`);
    this.service("target", target.up, target.up ? "up" : "away", target.up ? `${target.model}, ${target.numerics_id}` : target.reason);
    const hosted = !draft.configured && target.drafters.length > 0;
    if (hosted) this.service("draft", true, "in the target", target.drafters.join(", "));
    else this.service("draft", draft.up, !draft.configured ? "none" : draft.up ? "up" : "away", draft.up ? draft.model : draft.reason);
    const choice = policy.draft_count === 0 ? "0, plain" : plural(policy.draft_count, "guess");
    this.service("policy", null, choice, `of late ${percent(policy.acceptance_rate)} accepted`);
    this.list.querySelector('[data-service="policy"]').title = policy.choice.reason;
    this.tell(this.warning());
  }

  warning() {
    const { gateway, target, draft } = this.now;
    if (!target.up) return "The target is away. New requests wait for it, and running ones go on when it is back.";
    if (!draft.configured && target.drafters.length > 0) return "";
    if (!draft.configured && gateway.drafters.length > 0) return "No draft is configured: only what repeats the text before it is guessed.";
    if (!draft.configured) return "No draft is configured: every answer is decoded plainly.";
    if (!draft.up) return "Degraded: the draft is away. Answers go on without it, only slower, and speculation comes back when the draft does.";
    return "";
  }

  tell(text) {
    this.banner.hidden = text === "";
    if (this.banner.textContent !== text) this.banner.textContent = text;
  }

  service(name, up, word, detail) {
    const entry = this.list.querySelector(`[data-service="${name}"]`);
    const dot = entry.querySelector(".dot");
    if (dot !== null) dot.className = `dot${up === true ? " up" : up === false ? " away" : ""}`;
    entry.dataset.state = word;
    entry.querySelector("b").textContent = word;
    entry.querySelector("small").textContent = detail;
  }
}
