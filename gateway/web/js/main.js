// Wires the page together: buttons and keys, one run or a race at a time, and one change of the page a frame.

import { drawCounts, drawPositions, drawTimes } from "./charts.js";
import { Composer } from "./chat/composer.js";
import { flash, openCopyDialog, save, toClipboard } from "./copying.js";
import { events } from "./events.js";
import { Tip } from "./facts.js";
import { drawFigures, drawLegend, result, summary } from "./figures.js";
import { Gateway } from "./gateway.js";
import { Painter, Seen } from "./painter.js";
import { clock, lanes, verdict } from "./race.js";
import { RoundsView } from "./rounds.js";
import { Run } from "./run.js";
import { Settings } from "./settings.js";
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
      stream: new Stream(at(id).querySelector(".stream"), tip, at("facts")),
      run: null,
    }));
    this.rounds = new RoundsView(at("rounds"), at("rounds-note"), at("trees"));
    this.stopping = null;
    this.figuresAt = 0;
    this.chartsSeen = new Seen(at("counts"));
    this.painter = new Painter(() => this.draw());
    // What each view shows of its last runs while the other one is seen.
    this.kept = { chat: [], completion: [] };
    this.view = "";
    this.composer = new Composer(tip, at("facts"));
    this.settings = new Settings(at("ask"), (view) => this.open(view));
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
    click("copy-as", () => this.copyAs());
    click("copy-link", () => this.copyLink());
    for (const id of ["copy-text", "copy-answer"]) click(id, () => this.say(id, toClipboard(this.lanes[0].run.text), "Mark the answer instead."));
    click("download", () => this.download());
    at("show-marks").addEventListener("change", (event) => at("answer").classList.toggle("unmarked", !event.target.checked));
    at("show-rejected").addEventListener("change", (event) => at("answer").classList.toggle("with-rejected", event.target.checked));
    at("show-rendered").addEventListener("change", () => this.render());
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

  async generate() {
    if (this.busy || !at("ask").reportValidity()) return;
    const asked = this.composer.asked(this.view, false);
    if (asked === null) return;
    const request = { ...asked, ...this.settings.request(), probabilities: true, explain: true };
    request.speculation.return_rounds = true;
    this.begin([request]);
    await this.follow(this.lanes[0]);
    this.end();
  }

  // One after the other: together they would share the machine, and neither clock would mean anything.
  async race() {
    if (this.busy || !at("ask").reportValidity()) return;
    const asked = this.composer.asked(this.view, true);
    if (asked === null) return;
    this.begin(lanes({ ...asked, ...this.settings.request() }));
    const [fast, plain] = this.lanes;
    await this.follow(fast);
    if (fast.run.completion !== null && !this.stopping.signal.aborted) {
      plain.run.request.seed = fast.run.completion.seed;
      await this.follow(plain);
    }
    this.end();
  }

  begin(requests) {
    this.stopping = new AbortController();
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
    lane.stream.clear(lane.run, lane.run?.request.prompt, this.rendered);
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
        if (run.rounds.at(-1)?.fallback_reason && !lane.told) this.status.ask();
        lane.told = Boolean(run.rounds.at(-1)?.fallback_reason);
        this.painter.ask();
      }
    } catch (error) {
      if (this.stopping.signal.aborted) run.stopped = true;
      else run.error = { reason: error.reason ?? "", message: error.message };
    }
  }

  end() {
    const runs = this.lanes.map((lane) => lane.run).filter((run) => run !== null);
    this.stopping = null;
    this.draw();
    if (this.view === "chat" && !this.composer.take(runs[0])) for (const lane of this.lanes) lane.box.hidden = true;
    this.present();
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
    at("failure").textContent = broken ? broken.error.message : "";
    at("result").textContent = fast === null ? "" : result(fast);
    at("result").hidden = at("result").textContent === "";
    at("verdict").hidden = plain === null;
    if (plain === null) return;
    const { same, head, lines } = verdict(fast, plain);
    const title = document.createElement("strong");
    title.textContent = head;
    at("verdict").className = `verdict ${same ? "same" : "other"}`;
    at("verdict").replaceChildren(title, `\n${lines.join("\n")}`);
    at("thread").scrollTop = at("thread").scrollHeight;
  }

  stop() {
    this.stopping?.abort();
  }

  enable() {
    for (const id of ["generate", "race", "send", "race-turn", "forget"]) at(id).ariaDisabled = String(this.busy);
    for (const id of ["stop", "stop-turn"]) at(id).ariaDisabled = String(!this.busy);
    for (const id of ["download", "copy-text", "copy-answer"]) at(id).ariaDisabled = String(this.busy || this.lanes[0].run === null);
  }

  draw() {
    const running = this.lanes.filter((lane) => lane.run !== null && lane.startedMs !== null);
    for (const lane of running) {
      lane.stream.draw();
      const elapsedMs = lane.run.ended ? lane.run.lastUs / 1e3 : performance.now() - lane.startedMs;
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

  forget() {
    this.composer.forget();
    this.put([]);
    this.present();
    at("announce").textContent = "The conversation is forgotten.";
  }

  copyAs() {
    if (!at("ask").reportValidity()) return;
    const asked = this.composer.preview(this.view);
    if (asked !== null) openCopyDialog(() => ({ ...asked, ...this.settings.request() }), () => this.status.now, this.gateway.key !== null);
  }

  copyLink() {
    const link = this.settings.link(this.composer.lastMessage);
    history.replaceState(null, "", link);
    this.say("copy-link", toClipboard(link), "The address bar has the link.");
  }

  download() {
    const shown = this.lanes.filter((lane) => lane.run !== null).map((lane) => lane.run);
    const before = this.view === "chat" ? this.composer.runs.filter((run) => !shown.includes(run)) : [];
    const runs = [...before, ...shown].map((run) => ({ request: run.request, stopped: run.stopped, events: run.events }));
    save("outrider-trace.json", { format: "outrider-trace-1", saved: new Date().toISOString(), status: this.status.now, runs });
  }

  async say(id, done, instead) {
    const copied = await done;
    flash(at(id), copied ? "Copied" : "Not copied");
    at("announce").textContent = copied ? "Copied." : `The browser did not let the page copy. ${instead}`;
  }
}

new Page();
