// What the Anthropic SDK makes of the router's answers: one JSON object a line on standard output.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic(); // ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY
const model = "deepseek-v4-flash";
const body = (content) => ({ model, max_tokens: 400, messages: [{ role: "user", content }] });
const tools = [{ name: "get_weather", input_schema: {
  type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];

const stories = {
  async whole() {
    const m = await client.messages.create(body("say PONG"));
    return { kinds: m.content.map((b) => b.type), text: m.content.at(-1).text, stop: m.stop_reason };
  },
  async helper() {
    const stream = client.messages.stream({ ...body("two calls"), tools });
    const seen = { text: "", thinking: "" };
    stream.on("text", (t) => { seen.text += t; });
    stream.on("thinking", (t) => { seen.thinking += t; });
    const m = await stream.finalMessage();
    return { ...seen, calls: m.content.filter((b) => b.type === "tool_use").map((b) => [b.name, b.input]),
             signed: m.content.filter((b) => b.type === "thinking").every((b) => b.signature.length > 0),
             stop: m.stop_reason, output: m.usage.output_tokens };
  },
  async slowPrefill() {
    const m = await client.messages.stream(body("slow prefill")).finalMessage();
    return { text: m.content.at(-1).text };
  },
  async count() {
    const { input_tokens: counted } = await client.messages.countTokens({
      model, messages: [{ role: "user", content: "say PONG" }], tools });
    const { usage } = await client.messages.create({ ...body("say PONG"), tools });
    return { same: counted === usage.input_tokens + usage.cache_read_input_tokens, counted };
  },
  async models() {
    const ids = [];
    for await (const entry of client.models.list()) ids.push(entry.id);
    return { ids, one: (await client.models.retrieve(ids[0])).id };
  },
  async badRequest() {
    try {
      await client.messages.create({ ...body("x"), temperature: 9 });
    } catch (e) {
      return { name: e.constructor.name, status: e.status, type: e.error?.error?.type, id: !!e.requestID };
    }
  },
  async tooLong() {
    try {
      await client.messages.create(body("word ".repeat(60000)));
    } catch (e) {
      return { name: e.constructor.name, message: e.error?.error?.message };
    }
  },
  async streamError() {
    let text = "";
    try {
      const stream = client.messages.stream(body("not finite"));
      stream.on("text", (t) => { text += t; });
      await stream.finalMessage();
    } catch (e) {
      return { name: e.constructor.name, type: e.error?.error?.type, some: text.length > 0 };
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
