// A conversation with tool calls, held by the OpenAI SDK for Node as it is.
//
//     node openai_node.mjs FOLDER URL SESSION TOOLS [stream]     FOLDER: where npm installed it; TOOLS: JSON
//
// Prints the finish reason of each turn, as JSON.
import { createRequire } from "node:module";
import path from "node:path";

const [folder, baseURL, session, tools, stream] = process.argv.slice(2);
const { OpenAI } = createRequire(path.join(folder, "package.json"))("openai");
const client = new OpenAI({
  baseURL,
  apiKey: "none",
  maxRetries: 0,
  defaultHeaders: { "X-Session-ID": session },
});

// The chunks of one choice, put together as applications do it: the SDK's own helper throws where a turn is cut off.
async function streamed(params) {
  const message = { role: "assistant", content: null };
  let finish_reason = null;
  for await (const chunk of await client.chat.completions.create({ ...params, stream: true })) {
    for (const { delta, finish_reason: reason } of chunk.choices) {
      if (delta.content) message.content = (message.content ?? "") + delta.content;
      for (const { index, id, function: part } of delta.tool_calls ?? []) {
        message.tool_calls ??= [];
        const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
        call.function.name += part?.name ?? "";
        call.function.arguments += part?.arguments ?? "";
      }
      finish_reason = reason ?? finish_reason;
    }
  }
  return { message, finish_reason };
}

const common = { model: "smollm2", temperature: 1.2, tools: JSON.parse(tools) };
const messages = [];
const reasons = [];
for (const [text, choice] of [
  ["Is it warmer in Paris or in Rome?", "required"],
  ["And so?", "none"],
  ["How much is 18 * 7?", "required"],
  ["Thank you!", "none"],
]) {
  messages.push({ role: "user", content: text });
  // room for a call whose arguments hold much white space
  const params = { ...common, messages, tool_choice: choice, max_tokens: choice === "required" ? 256 : 64 };
  const { message, finish_reason } = stream
    ? await streamed(params)
    : (await client.chat.completions.create(params)).choices[0];
  reasons.push(finish_reason);
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    messages.push({ role: "tool", tool_call_id: call.id, content: '{"temperature": 18}' });
  }
}
console.log(JSON.stringify(reasons));
