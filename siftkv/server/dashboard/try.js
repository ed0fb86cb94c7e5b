// A box that sends one prompt and streams the answer.

import { events, getJson } from "./api.js";
import { byId, bytes, few, percent } from "./format.js";

const answer = byId("try-answer");
const usage = byId("try-usage");

let running = null;

function ask() {
  const prompt = byId("try-prompt").value;
  const kv = byId("try-kv").value.trim();
  const shared = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(byId("try-tokens").value) || 256,
    ...(kv ? { kv } : {}),
  };
  return byId("try-endpoint").value === "chat"
    ? ["v1/chat/completions", { ...shared, messages: [{ role: "user", content: prompt }] }]
    : ["v1/completions", { ...shared, prompt }];
}

function tell(found, seconds) {
  const parts = [`${found.prompt_tokens} + ${found.completion_tokens} tokens in ${few(seconds)} s`];
  const { kv } = found;
  if (kv) {
    const total = Object.values(kv.tokens_by_tier ?? {}).reduce((a, b) => a + b, 0) || 1;
    const shares = Object.entries(kv.tokens_by_tier ?? {}).filter(([, count]) => count > 0);
    parts.push(`KV cache: ${bytes(kv.physical_bytes)}, ${percent(kv.ratio, 1)} of bf16`);
    if (shares.length) parts.push(shares.map(([name, count]) => `${name} ${percent(count / total)}`).join(", "));
  }
  usage.textContent = parts.join("; ");
}

async function stream() {
  const started = performance.now();
  const models = await getJson("v1/models");
  const [path, body] = ask();
  for await (const event of events(path, { body: { ...body, model: models.data[0].id }, signal: running.signal })) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    answer.append(choice?.delta?.content ?? choice?.text ?? "");
    answer.scrollTop = answer.scrollHeight;
    if (event.usage) tell(event.usage, (performance.now() - started) / 1000);
  }
}

async function send(submitted) {
  submitted.preventDefault();
  if (running) return;
  running = new AbortController();
  byId("try-send").disabled = true;
  byId("try-stop").disabled = false;
  answer.hidden = false;
  answer.textContent = "";
  usage.textContent = "";
  try {
    await stream();
  } catch (error) {
    usage.textContent = error.name === "AbortError" ? "Stopped." : `Refused: ${error.message}`;
  } finally {
    running = null;
    byId("try-send").disabled = false;
    byId("try-stop").disabled = true;
  }
}

byId("try-form").addEventListener("submit", send);
byId("try-stop").addEventListener("click", () => running?.abort());
