// What leaves the page: the clipboard, a file, and the dialog with the request as code.

import { SNIPPETS } from "./snippets.js";

const [GRPC_PORT, SHOWN_MS] = [50050, 2000];
const at = (id) => document.getElementById(id);

// Returns whether it worked: browsers refuse it outside of secure origins, and then what is shown can still be marked.
export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

// A button says for a moment what came of it. A user who does not see it hears the announcement.
export function flash(button, text) {
  button.dataset.label ??= button.textContent;
  button.textContent = text;
  setTimeout(() => {
    button.textContent = button.dataset.label;
  }, SHOWN_MS);
}

export function save(name, value) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function openCopyDialog(request, status, keyed) {
  const [dialog, language, code] = [at("copy-dialog"), at("language"), at("snippet")];
  const show = () => {
    const gateway = status()?.gateway;
    const place = {
      origin: new URL(".", location.href.split("#")[0]).href,
      model: gateway?.model ?? "outrider",
      grpc: `${location.hostname}:${gateway?.grpc_port ?? GRPC_PORT}`,
      keyed,
    };
    code.textContent = SNIPPETS[language.value](request(), place);
    at("snippet-copy").textContent = "Copy";
  };
  language.onchange = show;
  at("snippet-copy").onclick = async () => {
    const copied = await toClipboard(code.textContent);
    if (!copied) getSelection().selectAllChildren(code);
    at("snippet-copy").textContent = copied ? "Copied" : "Marked: copy it with Ctrl+C";
  };
  at("snippet-close").onclick = () => dialog.close();
  show();
  dialog.showModal();
}
