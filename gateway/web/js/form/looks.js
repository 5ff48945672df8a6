// What the user wants to see of the page, kept in this browser: boxes that are checked, and what is folded up.

const NAME = "outrider-looks";

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    return typeof kept === "object" && kept !== null ? kept : {};
  } catch {
    return {}; // Nothing is kept here, or nothing of ours.
  }
}

function write(id, value) {
  try {
    localStorage.setItem(NAME, JSON.stringify({ ...read(), [id]: value }));
  } catch {
    // It holds until the page is closed.
  }
}

// Sets a checkbox, or a fold, as it was left, and keeps what becomes of it.
export function keepLook(element) {
  const [property, event] = element.tagName === "DETAILS" ? ["open", "toggle"] : ["checked", "change"];
  const kept = read()[element.id];
  if (typeof kept === "boolean") element[property] = kept;
  let last = element[property];
  element.addEventListener(event, () => {
    // What was set here was nobody's choice.
    if (element[property] !== last) write(element.id, element[property]);
    last = element[property];
  });
}
