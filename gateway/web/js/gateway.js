// Calls of the gateway, with the key that it may ask for. The user is asked for one once; it stays in this tab's session.

const NAME = "outrider-api-key";

export class Gateway {
  constructor(dialog) {
    this.dialog = dialog;
    this.asking = null;
    this.dismissed = false;
  }

  get key() {
    return sessionStorage.getItem(NAME);
  }

  // As fetch. All calls that are refused for want of a key wait for the same answer of the user; who gives none is asked
  // again only by a call that insists, which is one that the user began.
  async call(path, { insists = false, timeoutMs = 0, ...options } = {}) {
    for (;;) {
      const { key } = this;
      const headers = { ...options.headers, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
      const signal = timeoutMs ? AbortSignal.timeout(timeoutMs) : options.signal;
      const response = await fetch(path, { ...options, headers, signal });
      if (response.status !== 401) return response;
      if (key === this.key && !(await this.ask(insists))) return response;
    }
  }

  ask(insists) {
    if (this.dismissed && !insists) return false;
    this.asking ??= this.answer().finally(() => {
      this.asking = null;
    });
    return this.asking;
  }

  answer() {
    const { dialog } = this;
    const field = dialog.querySelector("input");
    dialog.querySelector("#key-wrong").hidden = this.key === null;
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
      const closed = () => {
        this.dismissed = dialog.returnValue !== "enter";
        if (!this.dismissed) sessionStorage.setItem(NAME, field.value);
        field.value = "";
        resolve(!this.dismissed);
      };
      dialog.addEventListener("close", closed, { once: true });
    });
  }
}
