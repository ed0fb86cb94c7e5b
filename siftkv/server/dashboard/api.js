// Requests to the server: JSON, and streams of server-sent events. A key, where one is asked for, stays in this tab.

const KEY = "siftkv-key";

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

export class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.detail ?? message;
  } catch {
    // the body is no JSON: the status says what there is to say
  }
  throw new RefusedError(response.status, String(message));
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function* events(path, options = {}) {
  const { body, signal } = options;
  const response = await checked(
    await fetch(path, {
      method: body ? "POST" : "GET",
      headers: headers(body ? { "Content-Type": "application/json" } : {}),
      body: body && JSON.stringify(body),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (pending + value).split("\n");
    pending = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
