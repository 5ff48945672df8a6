// Examples of the completion view: each fills in the form and runs nothing.

// What repeats itself is what `lookup` finds again.
const REFRAIN = "Run, run, as fast as you can! You can't catch me, I'm the Gingerbread Man! ";
const LINES = "if door == 'open':\n    go_in()\nelse:\n    knock()\n\n";
export const PRESETS = [
  {
    name: "Story",
    prompt: "Once upon a time there was a poor woodcutter, who lived with his wife and his three children near a great forest.",
    temperature: "0.7", draft_count: "4", max_tokens: "160",
  },
  {
    name: "Dialogue",
    prompt: "“Where are you going so early?” said the wolf. “To my grandmother,” answered the child. “And what",
    temperature: "0.8", draft_count: "4", max_tokens: "160",
  },
  {
    name: "List",
    prompt: "The first brother had a sword, the second brother had a horn, and the third brother had a cap. The first brother",
    temperature: "0", draft_count: "6", max_tokens: "160",
  },
  {
    name: "Repetition",
    prompt: `${REFRAIN.repeat(4)}Run, run,`,
    temperature: "0", draft_count: "8", max_tokens: "128",
  },
  {
    name: "Surprise",
    prompt: "The queen opened the little box, and inside it lay",
    temperature: "1.3", draft_count: "4", max_tokens: "160",
  },
  {
    name: "Code",
    prompt: `${LINES.repeat(6)}if`,
    temperature: "0", draft_count: "8", max_tokens: "128",
  },
];
