// Wires the page together: buttons and keys, one run or a race at a time, and one change of the page a frame.

import { drawCounts, drawPositions, drawTimes } from "./charts.js";
import { Composer } from "./chat/composer.js";
import { Library } from "./chat/library.js";
import { flash, openCopyDialog, save, toClipboard } from "./copying.js";
import { events } from "./events.js";
import { Tip } from "./facts.js";
import { drawFigures, drawLegend, life, result, summary } from "./figures.js";
import { keepLook } from "./form/looks.js";
import { Settings } from "./form/settings.js";
import { Gateway } from "./gateway.js";
import { Painter, Seen } from "./painter.js";
import { AGAIN, clock, lane, verdict } from "./race.js";
import { RoundsView } from "./rounds.js";
import { Run } from "./run.js";
import { Status } from "./status.js";
import { Stream } from "./stream.js";

const FIGURES_MS = 100;
const at = (id) => document.getElementById(id);

class Page {
  constructor() {
    const tip = new Tip(at("tip"));
    this.lanes = ["lane-main", "lane-plain"].map((id) => ({
      box: at(id),
      clock: at(id).querySelector(".clock"),
      life: at(id).querySelector(".life"),
      stream: new Stream(at(id).querySelector(".stream"), tip, at("facts")),
      run: null,
    }));
    this.rounds = new RoundsView(at("rounds"), at("rounds-note"), at("trees"));
    this.stopping = null;
    this.ended = Promise.resolve();
    this.figuresAt = 0;
    this.chartsSeen = new Seen(at("counts"));
    this.painter = new Painter(() => this.draw());
    // What each view shows of its last runs while the other one is seen.
    this.kept = { chat: [], completion: [] };
    this.view = "";
    this.composer = new Composer(tip, at("facts"));
    this.settings = new Settings(at("ask"), (view) => this.open(view));
    at("library").open = matchMedia("(min-width: 62rem)").matches;
    this.library = new Library(this.composer.conversation, { open: (kept) => this.become(kept), gone: () => this.forget() });
    this.gateway = new Gateway(at("key-dialog"));
    this.status = new Status(this.gateway, at("services"), at("banner"), (now) => this.know(now));
    this.listen(tip);
  }

  get busy() {
    return this.stopping !== null;
  }

  get rendered() {
    return this.view === "chat" && at("show-rendered").checked;
  }

  listen(tip) {
    const click = (id, act) => at(id).addEventListener("click", (event) => event.currentTarget.ariaDisabled === "true" || act());
    at("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    for (const id of ["race", "race-turn"]) click(id, () => this.race());
    for (const id of ["stop", "stop-turn"]) click(id, () => this.stop());
    click("forget", () => this.forget());
    click("regenerate", () => this.again(null));
    click("retry", () => this.retry());
    click("copy-as", () => this.copyAs());
    click("copy-link", () => this.copyLink());
    for (const id of ["copy-text", "copy-answer"]) click(id, () => this.say(id, toClipboard(this.lanes[0].run.text), "Mark the answer instead."));
    click("download", () => this.download());
    for (const id of ["show-figures", "show-marks", "show-rejected", "show-rendered", "library", "more-sampling", "more-form"]) keepLook(at(id));
    const look = () => {
      document.querySelector("main").classList.toggle("folded", !at("show-figures").checked);
      at("answer").classList.toggle("unmarked", !at("show-marks").checked);
      at("answer").classList.toggle("with-rejected", at("show-rejected").checked);
    };
    for (const id of ["show-figures", "show-marks", "show-rejected"]) at(id).addEventListener("change", look);
    at("show-rendered").addEventListener("change", () => this.render());
    look();
    this.composer.render(at("show-rendered").checked);
    // A tab may be closed in the middle of an answer.
    document.addEventListener("visibilitychange", () => document.hidden && this.busy && this.keep());
    document.addEventListener("keydown", (event) => {
      const sends = event.ctrlKey || event.metaKey || (event.target === at("message") && !event.shiftKey && !event.isComposing);
      if (event.key === "Enter" && sends) {
        event.preventDefault();
        this.generate();
      }
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      if (this.busy) this.stop();
      else this.composer.cancel();
      tip.hide();
    });
  }

  // The first answer of the gateway says which view a fresh page shows: the conversation where the model has a template.
  know(now) {
    if (now !== null) this.settings.offer(now.gateway.drafters);
    if (now !== null) this.settings.recommend(now.gateway.generation_defaults);
    at("no-template").hidden = now === null || now.gateway.has_chat_template;
    this.settings.settle(now?.gateway.has_chat_template ? "chat" : "completion");
    this.library.restore();
  }

  // Shows the other view, with the last runs that it had.
  open(view) {
    if (this.busy) {
      this.stop(); // and comes again when that has ended
      return;
    }
    if (this.view !== "") this.kept[this.view] = this.lanes.map((lane) => lane.run).filter((run) => run !== null);
    this.view = view;
    document.querySelector("main").dataset.view = this.view;
    at("answer-title").textContent = this.view === "chat" ? "Conversation" : "Answer";
    this.put(this.kept[this.view]);
    this.present();
  }

  generate() {
    return this.ask(() => this.composer.asked(this.view, false));
  }

  // One after the other: together they would share the machine, and neither clock would mean anything.
  race() {
    return this.ask(() => this.composer.asked(this.view, true), true);
  }

  // The last message once more: from a seed the same answer, without one another.
  again(seed) {
    return this.ask(() => this.composer.again(seed));
  }

  // What was refused comes again as it is written now, and what broke off from its own seed.
  retry() {
    const [{ run }] = this.lanes;
    if (this.view === "completion" || this.composer.isBack) return at("answer").classList.contains("racing") ? this.race() : this.generate();
    return this.again(run.opened?.seed ?? null);
  }

  // Follows the request that `make` makes, if the form is right and it makes one.
  async ask(make, races = false) {
    if (this.busy || !this.settings.valid()) return;
    const asked = make();
    if (asked === null) return;
    const request = { ...this.settings.request(), ...asked };
    const speculation = { ...request.speculation, return_rounds: true };
    this.begin(races ? [true, false].map((enabled) => lane(request, enabled)) : [{ ...request, speculation, probabilities: true, explain: true }]);
    const [fast, plain] = this.lanes;
    await this.follow(fast);
    if (races && fast.run.completion !== null && !this.stopping.signal.aborted) {
      plain.run.request.seed = fast.run.completion.seed;
      await this.follow(plain);
      if (plain.run.completion !== null) await this.repeat(fast.run, plain.run);
    }
    this.end();
  }

  // Both answers again, by turns, of which only the verdict is seen.
  async repeat(fast, plain) {
    at("verdict").className = "verdict";
    at("verdict").hidden = false;
    for (const [place, enabled] of AGAIN.entries()) {
      if (this.stopping.signal.aborted) return;
      at("verdict").textContent = `Both answers again, by turns, to see whether the machine is busy: ${place + 1} of ${AGAIN.length}.`;
      const run = new Run(lane(plain.request, enabled));
      (enabled ? fast : plain).again.push(run);
      await this.follow({ run });
    }
  }

  begin(requests) {
    this.stopping = new AbortController();
    this.ended = new Promise((resolve) => { this.tellEnd = resolve; });
    this.put(requests.map((request) => new Run(request)));
    for (const id of ["failure", "verdict", "facts", "result"]) at(id).hidden = true;
    this.composer.draw();
    this.enable();
    this.showAnswer();
    at("announce").textContent = requests.length > 1 ? "The race has begun." : "Generating.";
    this.painter.ask();
  }

  // Runs that have not begun yet, or that have ended.
  put(runs) {
    at("answer").classList.toggle("racing", runs.length > 1);
    for (const [index, lane] of this.lanes.entries()) {
      lane.run = runs[index] ?? null;
      lane.startedMs = lane.run?.ended ? 0 : null;
      lane.box.hidden = lane.run === null && (index > 0 || this.view === "chat");
      lane.clock.textContent = "waiting";
      this.clear(lane);
    }
    this.rounds.clear(this.lanes[0].run);
  }

  clear(lane) {
    lane.stream.clear(lane.run, lane.run?.request?.prompt, this.rendered);
  }

  // In one column the answer would come out of sight.
  showAnswer() {
    if (at("lanes").getBoundingClientRect().top > 0.8 * innerHeight) at("answer").scrollIntoView();
    at("thread").scrollTop = at("thread").scrollHeight;
  }

  render() {
    this.composer.render(this.rendered);
    this.lanes.forEach((lane) => this.clear(lane));
    this.draw();
  }

  async follow(lane) {
    const { run } = lane;
    lane.startedMs = performance.now();
    this.painter.ask();
    try {
      for await (const event of events(this.gateway, run.request, this.stopping.signal)) {
        run.take(event, performance.now() - lane.startedMs);
        if (event.event === "opened" && lane === this.lanes[0]) this.keep();
        if (run.rounds.at(-1)?.fallback_reason && !lane.told) this.status.ask();
        lane.told = Boolean(run.rounds.at(-1)?.fallback_reason);
        this.painter.ask();
      }
    } catch (error) {
      if (this.stopping.signal.aborted) run.stopped = true;
      else run.error = { reason: error.reason ?? "", message: error.message, metadata: { field: error.param } };
    }
  }

  end() {
    const runs = this.lanes.map((lane) => lane.run).filter((run) => run !== null);
    this.stopping = null;
    this.draw();
    if (this.view === "chat" && !this.composer.take(runs[0])) for (const lane of this.lanes) lane.box.hidden = true;
    if (this.view === "chat") this.keep();
    for (const { error } of runs) if (error) this.settings.refused(error.metadata?.field, error.message);
    this.present();
    this.tellEnd();
    at("announce").textContent = runs.length > 1 ? at("verdict").textContent.replaceAll("\n", " ") : summary(runs[0]);
    if (this.view !== this.settings.view) this.open(this.settings.view);
  }

  // All that is said of the runs beside their tokens.
  present() {
    const [fast, plain] = this.lanes.map((lane) => lane.run);
    const broken = [fast, plain].find((run) => run?.error);
    this.enable();
    this.draw();
    at("facts").hidden = true;
    at("failure").hidden = !broken;
    at("failure").firstElementChild.textContent = broken ? broken.error.message : "";
    at("result").textContent = fast === null ? "" : result(fast);
    at("result").hidden = at("result").textContent === "";
    at("verdict").hidden = plain === null;
    if (broken) at("thread").scrollTop = at("thread").scrollHeight;
    if (plain === null) return;
    const { tone, head, lines } = verdict(fast, plain);
    const title = document.createElement("strong");
    title.textContent = head;
    at("verdict").className = `verdict ${tone}`;
    at("verdict").replaceChildren(title, `\n${lines.join("\n")}`);
    at("thread").scrollTop = at("thread").scrollHeight;
  }

  stop() {
    this.stopping?.abort();
  }

  enable() {
    for (const id of ["generate", "race", "send", "race-turn", "forget", "retry"]) at(id).ariaDisabled = String(this.busy);
    for (const id of ["stop", "stop-turn"]) at(id).ariaDisabled = String(!this.busy);
    for (const id of ["download", "copy-text", "copy-answer", "regenerate"]) at(id).ariaDisabled = String(this.busy || this.lanes[0].run === null);
  }

  draw() {
    const running = this.lanes.filter((lane) => lane.run !== null && lane.startedMs !== null);
    for (const lane of running) {
      lane.stream.draw();
      const elapsedMs = lane.run.ended ? lane.run.lastUs / 1e3 : performance.now() - lane.startedMs;
      const alive = life(lane.run, elapsedMs);
      lane.life.hidden = alive === "";
      if (alive !== lane.life.textContent) lane.life.textContent = alive;
      const queued = lane.run.waiting && alive !== "" && lane.run.opened === null ? alive.split(" · ")[0] : "";
      if (queued !== lane.queued && queued !== "") at("announce").textContent = queued;
      lane.queued = queued;
      if (at("answer").classList.contains("racing")) lane.clock.textContent = clock(lane.run, elapsedMs);
    }
    this.rounds.draw(!this.busy);
    if (!this.busy || performance.now() - this.figuresAt >= FIGURES_MS) this.drawFigures();
    if (this.busy) this.painter.ask();
  }

  drawFigures() {
    this.figuresAt = performance.now();
    const run = this.lanes[0].run ?? new Run(null);
    drawLegend(at("legend"), run);
    drawFigures(at("figures"), run);
    if (this.busy && !this.chartsSeen.now) return;
    drawPositions(at("positions"), run);
    drawTimes(at("times-bar"), at("times"), run);
    drawCounts(at("counts"), at("counts-range"), run);
  }

  // Keeps the conversation, with what there is of the answer that is under way.
  keep() {
    this.library.keep(this.composer.system, this.busy && this.view === "chat" ? this.lanes[0].run : null);
  }

  // Ends what runs, and waits until it is kept.
  async rest() {
    this.stop();
    await this.ended;
  }

  async forget() {
    await this.rest();
    this.composer.forget();
    this.library.leave();
    this.put([]);
    this.present();
    at("announce").textContent = "A new conversation.";
  }

  // Goes on with a kept conversation.
  async become(kept) {
    await this.rest();
    this.composer.become(kept);
    const { current } = this.composer.conversation;
    const runs = current === null ? [] : [current.run];
    if (this.view !== "chat") {
      this.kept.chat = runs;
      return;
    }
    this.put(runs);
    this.present();
    this.showAnswer();
    at("announce").textContent = `The conversation “${kept.title}” is open.`;
  }

  copyAs() {
    if (!this.settings.valid()) return;
    const asked = this.composer.preview(this.view);
    if (asked !== null) openCopyDialog(() => ({ ...asked, ...this.settings.request() }), () => this.status.now, this.gateway.key !== null);
  }

  copyLink() {
    const link = this.settings.link(this.composer.lastMessage);
    history.replaceState(null, "", link);
    this.say("copy-link", toClipboard(link), "The address bar has the link.");
  }

  download() {
    const shown = this.lanes.flatMap(({ run }) => (run === null ? [] : [run, ...run.again]));
    const before = this.view === "chat" ? this.composer.runs.filter((run) => !shown.includes(run)) : [];
    // Of kept ones there are no events.
    const runs = [...before, ...shown].filter((run) => run.events.length > 0).map((run) => ({ request: run.request, stopped: run.stopped, events: run.events }));
    save("outrider-trace.json", { format: "outrider-trace-1", saved: new Date().toISOString(), status: this.status.now, runs });
  }

  async say(id, done, instead) {
    const copied = await done;
    flash(at(id), copied ? "Copied" : "Not copied");
    at("announce").textContent = copied ? "Copied." : `The browser did not let the page copy. ${instead}`;
  }
}

new Page();
