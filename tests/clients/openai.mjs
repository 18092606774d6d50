// What the OpenAI SDK makes of the router's answers: one JSON object a line on standard output.
import OpenAI from "openai";

const client = new OpenAI(); // OPENAI_BASE_URL, OPENAI_API_KEY
const model = "deepseek-v4-flash";
const ask = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const chatTools = [{ type: "function", function: { name: "get_weather", parameters } }];
const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];

const stories = {
  async whole() {
    const c = await client.chat.completions.create({ model, messages: ask("say PONG") });
    return { text: c.choices[0].message.content, finish: c.choices[0].finish_reason, total: c.usage.total_tokens };
  },
  async deltas() {
    const seen = { text: "", reasoning: "", both: true, finish: null, usage: null };
    const stream = await client.chat.completions.create({
      model, messages: ask("say PONG"), stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) {
      const delta = chunk.choices[0]?.delta ?? {};
      seen.text += delta.content ?? "";
      seen.reasoning += delta.reasoning_content ?? "";
      seen.both &&= delta.reasoning === delta.reasoning_content;
      seen.finish ??= chunk.choices[0]?.finish_reason;
      seen.usage ??= chunk.usage?.completion_tokens;
    }
    return seen;
  },
  async helper() {
    const stream = client.chat.completions.stream({ model, messages: ask("two calls"), tools: chatTools });
    const c = await stream.finalChatCompletion();
    return { calls: c.choices[0].message.tool_calls.map((t) => [t.function.name, JSON.parse(t.function.arguments)]),
             finish: c.choices[0].finish_reason };
  },
  async responses() {
    const r = await client.responses.create({ model, input: "say PONG", reasoning: { effort: "high" } });
    return { text: r.output_text, status: r.status, kinds: r.output.map((item) => item.type) };
  },
  async responsesHelper() {
    const events = [];
    const stream = client.responses.stream({
      model, input: "two calls", tools, reasoning: { effort: "high", summary: "auto" } });
    for await (const event of stream) events.push(event.sequence_number);
    const r = await stream.finalResponse();
    return { calls: r.output.filter((i) => i.type === "function_call").map((i) => [i.name, JSON.parse(i.arguments)]),
             gaps: events.filter((n, i) => n !== i), status: r.status };
  },
  async slowPrefill() {
    const kinds = [];
    const stream = client.responses.stream({ model, input: "slow prefill" });
    for await (const event of stream) kinds.push(event.type);
    return { text: (await stream.finalResponse()).output_text,
             repeated: kinds.filter((k) => k === "response.in_progress").length > 1 };
  },
  async completions() {
    const c = await client.completions.create({ model, prompt: "say PONG", max_tokens: 20 });
    return { text: c.choices[0].text, finish: c.choices[0].finish_reason };
  },
  async models() {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    return { ids, one: (await client.models.retrieve(ids[0])).id };
  },
  async badRequest() {
    try {
      await client.chat.completions.create({ model, messages: ask("x"), temperature: 9 });
    } catch (e) {
      return { name: e.constructor.name, status: e.status, code: e.code, param: e.param };
    }
  },
  async tooLong() {
    try {
      await client.chat.completions.create({ model, messages: ask("word ".repeat(60000)) });
    } catch (e) {
      return { name: e.constructor.name, code: e.code, message: e.message };
    }
  },
  async streamError() {
    let text = "";
    try {
      const stream = await client.chat.completions.create({ model, messages: ask("not finite"), stream: true });
      for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    } catch (e) {
      return { name: e.constructor.name, code: e.code, some: text.length > 0 };
    }
  },
};

for (const [name, story] of Object.entries(stories)) {
  let result;
  try {
    result = await story();
  } catch (e) {
    result = { threw: String(e.stack ?? e) };
  }
  console.log(JSON.stringify({ name, result }));
}
