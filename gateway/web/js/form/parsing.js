// Fields whose text is more than a number: what they say to the gateway, or why they say nothing, in one sentence.

const [MOST_ID, MOST_BIAS] = [2 ** 31 - 1, 100];

function json(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}.`);
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function tokenId(text) {
  if (!/^[0-9]{1,10}$/.test(text) || Number(text) > MOST_ID) throw new Error(`“${text}” is no id of a token: whole numbers from 0 to ${MOST_ID} are.`);
  return Number(text);
}

// One a line; `\n` stands for a line break within one.
function lines(text) {
  return text.split("\n").filter((line) => line !== "").map((line) => line.replaceAll("\\n", "\n"));
}

function bias(text) {
  const found = json(text);
  if (!isObject(found)) throw new Error('A bias is an object of token ids and numbers: {"198": -5}.');
  for (const [id, value] of Object.entries(found)) {
    tokenId(id);
    if (typeof value !== "number" || Math.abs(value) > MOST_BIAS) throw new Error(`The bias of ${id} is no number from -${MOST_BIAS} to ${MOST_BIAS}.`);
  }
  return found;
}

function schema(text) {
  const found = json(text);
  if (!isObject(found) && typeof found !== "boolean") throw new Error("A schema is an object, or true or false.");
  return found;
}

function tools(text) {
  const found = json(text);
  if (!Array.isArray(found)) throw new Error('Tools are a list: [{"type": "function", "function": {…}}].');
  for (const [place, tool] of found.entries()) {
    if (!isObject(tool) || tool.type !== "function" || !isObject(tool.function)) throw new Error(`Tool ${place + 1} is not {"type": "function", "function": {…}}.`);
    if (typeof tool.function.name !== "string" || tool.function.name === "") throw new Error(`Tool ${place + 1} has no name.`);
  }
  return found;
}

export const PARSED = {
  stop_strings: lines,
  banned_words: lines,
  stop_token_ids: (text) => text.split(/[\s,]+/).filter((id) => id !== "").map(tokenId),
  logit_bias: bias,
  schema,
  tools,
};
