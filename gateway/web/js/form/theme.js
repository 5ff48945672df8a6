// The theme, before anything is drawn: no module, because those wait until the page is read.

{
  const NAME = "outrider-theme";
  const { documentElement: root } = document;

  // A browser that keeps nothing has the system's theme on every visit.
  const kept = () => {
    try {
      return localStorage.getItem(NAME) ?? "";
    } catch {
      return "";
    }
  };
  const show = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  };

  show(kept());
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = root.dataset.theme ?? "";
    choice.addEventListener("change", () => {
      show(choice.value);
      try {
        localStorage.setItem(NAME, choice.value);
      } catch {
        // It holds until the page is closed.
      }
    });
    // Another tab's choice is everybody's.
    addEventListener("storage", (event) => {
      if (event.key !== NAME) return;
      show(kept());
      choice.value = root.dataset.theme ?? "";
    });
  });
}
