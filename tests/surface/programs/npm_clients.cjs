// Runs Vercel's AI SDK or LibreChat's library, which Node finds by NODE_PATH, and prints what it got as JSON.
"use strict";

// Text, an object and a call, each whole and streamed, and the error that a bad value becomes.
async function vercel(baseURL, model, schema) {
  const { generateText, jsonSchema, Output, streamText, tool } = require("ai");
  const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
  const options = { name: "outrider", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true };
  const provider = createOpenAICompatible(options);
  const ask = { model: provider(model), prompt: "Tell me of a fox.", temperature: 0, maxRetries: 0 };
  const inputSchema = jsonSchema(schema);
  const ways = {
    text: { ...ask, maxOutputTokens: 12 },
    object: { ...ask, maxOutputTokens: 120, output: Output.object({ schema: inputSchema }) },
    call: {
      ...ask,
      maxOutputTokens: 120,
      tools: { keep: tool({ inputSchema }) },
      toolChoice: "required",
      providerOptions: { outrider: { parallel_tool_calls: false } },
    },
  };
  const result = async (from, name) => ({
    text: await from.text,
    object: name === "object" ? await from.output : null,
    calls: (await from.toolCalls).map(({ toolName, input }) => ({ name: toolName, input })),
    reason: await from.finishReason,
    tokens: (await from.usage).outputTokens,
  });
  const told = {};
  for (const [name, way] of Object.entries(ways)) {
    told[name] = { whole: await result(await generateText(way), name) };
    const stream = streamText(way);
    await stream.consumeStream();
    told[name].streamed = await result(stream, name);
  }
  const refusal = await generateText({ ...ask, temperature: 1e6 }).catch((error) => error);
  told.refused = { status: refusal.statusCode, message: refusal.message };
  return told;
}

// A turn with a call of a tool and its result, as the chat's server runs it, and the chat's title.
async function librechat(baseURL, model, schema) {
  const { Providers, Run, TitleMethod } = require("@librechat/agents");
  const { HumanMessage } = require("@librechat/agents/langchain/messages");
  const { tool } = require("@librechat/agents/langchain/tools");
  const asked = [];
  const keep = tool(
    (pet) => {
      asked.push(pet);
      return "kept";
    },
    { name: "keep", description: "Keeps a pet.", schema },
  );
  const client = { model, apiKey: "none", configuration: { baseURL } };
  const run = await Run.create({
    runId: "run",
    graphConfig: {
      type: "standard",
      instructions: "Be brief.",
      llmConfig: { provider: Providers.OPENAI, ...client, streaming: true, streamUsage: true, user: "me" },
      tools: [keep],
    },
    returnContent: true,
  });
  const config = { configurable: { thread_id: "thread" }, streamMode: "values", version: "v2" };
  await run.processStream({ messages: [new HumanMessage("Keep my fox.")] }, config);
  const messages = run.getRunMessages();
  const title = await run.generateTitle({
    provider: Providers.OPENAI,
    inputText: "Keep my fox.",
    contentParts: [],
    titleMethod: TitleMethod.COMPLETION,
    skipLanguage: true,
    clientOptions: client,
    chainOptions: {},
  });
  return {
    asked,
    messages: messages.map((each) => ({ type: each.getType(), text: each.text, usage: each.usage_metadata })),
    title: title.title,
  };
}

const [client, baseURL, model, schema] = process.argv.slice(2);
({ vercel, librechat })[client](baseURL, model, JSON.parse(schema)).then((told) => {
  // LibreChat's library keeps something open that would not let the process end.
  process.stdout.write(`${JSON.stringify(told)}\n`, () => process.exit());
});
