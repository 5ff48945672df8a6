// When the page is drawn: at most once a frame, and in at most a fifth of the time, because the models may share the
// machine with the browser, and a race would measure the browser too.

const LONGEST_PAUSE_MS = 250;

export class Painter {
  constructor(draw) {
    this.draw = draw;
    this.pauseMs = 0;
    this.waiting = false;
  }

  ask() {
    if (this.waiting) return;
    this.waiting = true;
    const next = () => requestAnimationFrame(() => this.paint());
    if (this.pauseMs < 5) next();
    else setTimeout(next, this.pauseMs);
  }

  paint() {
    const began = performance.now();
    this.waiting = false;
    this.draw();
    // Comes after the frame, so layout and painting are in the time that it took.
    setTimeout(() => {
      this.pauseMs = Math.min(LONGEST_PAUSE_MS, 4 * (performance.now() - began));
    });
  }
}

// Whether somebody can see an element, more or less: what is not seen need not be drawn while it changes.
export class Seen {
  constructor(element) {
    this.now = true;
    new IntersectionObserver((entries) => {
      this.now = entries.at(-1).isIntersecting;
    }, { rootMargin: "100px" }).observe(element);
  }
}
