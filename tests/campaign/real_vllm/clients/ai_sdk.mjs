// A conversation with tool calls, held by an agent of the AI SDK.
//
//     node ai_sdk.mjs FOLDER PROVIDER URL CALL WORDS     FOLDER: where npm installed it
//
// The URL names a session. CALL and WORDS are its overrides, as JSON: see echoing.py.
import { createRequire } from "node:module";
import path from "node:path";

const [folder, provider, baseURL, call, words] = process.argv.slice(2);
const load = createRequire(path.join(folder, "package.json"));
const { generateText, jsonSchema, stepCountIs, tool } = load("ai");
const options = { baseURL, apiKey: "none" };
const model = {
  compatible: () => load("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "proxy", ...options })("smollm2"),
  chat: () => load("@ai-sdk/openai").createOpenAI(options).chat("smollm2"),
  responses: () => load("@ai-sdk/openai").createOpenAI(options).responses("smollm2"),
  messages: () => load("@ai-sdk/anthropic").createAnthropic(options)("smollm2"),
}[provider]();

async function sample(overrides) {
  const [root, id] = baseURL.replace(/\/v1$/, "").split("/sessions/");
  const headers = { "content-type": "application/json" };
  const body = `{"id": ${JSON.stringify(id)}, "overrides": ${overrides}}`;
  const answer = await fetch(`${root}/v1/sessions`, { method: "POST", headers, body });
  if (!answer.ok) throw new Error(await answer.text());
}

let calls = 0;
const weather = tool({
  description: "Weather of a city.",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" }, number: { type: "integer" } } }),
  execute: async ({ city }) => {
    await sample(++calls % 3 ? call : words);
    return `18 degrees in ${city}`;
  },
});
let messages = [];
for (const content of ["Is it warmer in Paris or in Rome?", "And in Oslo?"]) {
  await sample(call);
  messages.push({ role: "user", content });
  const settings = { model, messages, tools: { weather }, stopWhen: stepCountIs(9), maxRetries: 0 };
  messages = [...messages, ...(await generateText(settings)).responseMessages];
}
console.log("{}");
