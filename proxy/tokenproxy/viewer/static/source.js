// Where the page reads from: the server that it came from, or the data inside a page that was written to a file.

import { pairText } from "./format.js";

/** The server refused the key, or wants one. */
export class KeyNeeded extends Error {}

const KEY = "tokenproxy-viewer-key";

/** Reads from the server. */
export class ServerSource {
  live = true;

  constructor(root) {
    this.root = root;
  }

  set key(key) {
    sessionStorage.setItem(KEY, key);
  }

  async sessions(parameters) {
    return (await this.#get(`viewer/sessions?${new URLSearchParams(parameters)}`)).json();
  }

  /** A session; or what is new since a time, of a session whose last use was seen. */
  async session(name, since = null, used = null) {
    const query = since === null ? "" : `?since=${since}&used=${used}`;
    return (await this.#get(`viewer/sessions/${encodeURIComponent(name)}${query}`)).json();
  }

  async tokens(name, turn) {
    const response = await this.#get(`viewer/sessions/${encodeURIComponent(name)}/tokens?turn=${turn}`);
    return decodeTokens(await response.arrayBuffer());
  }

  async drift(name, turn, basis = "") {
    const query = `turn=${turn}&basis=${basis}`;
    return (await this.#get(`viewer/sessions/${encodeURIComponent(name)}/drift?${query}`)).json();
  }

  async #get(path) {
    const key = sessionStorage.getItem(KEY);
    // fetch refuses such a header, and the page would keep the key
    if (key && !/^[\x20-\x7e]+$/.test(key)) throw new KeyNeeded("an API key has ASCII characters only");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(new URL(path, this.root), { headers });
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status === 401 || response.status === 403) throw new KeyNeeded(message);
    throw new Error(message);
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Reads what `tokenproxy view` put into the page. */
export class FileSource {
  live = false;

  constructor(data) {
    this.data = data;
  }

  /** As the server; the folds are those of all sessions of the file. */
  async sessions(parameters) {
    const fold = parameters.get("fold");
    if (fold && Object.hasOwn(this.data.folds, fold)) return { ...this.data.folds[fold], next: null };
    const words = (parameters.get("search") || "").toLowerCase();
    const where = parameters.getAll("where");
    const holds = (text) => text.toLowerCase().includes(words);
    const rows = this.data.sessions.filter((row) => {
      const pairs = Object.entries(row.metadata ?? {}).map(([key, value]) => pairText(key, value));
      if (!where.every((pair) => pairs.includes(pair))) return false;
      if (!words || holds([row.id, ...pairs].join("\n"))) return true;
      if (parameters.get("messages") !== "true") return false;
      return this.data.trees[row.id].turns.some((turn) => texts([turn.messages, turn.message]).some(holds));
    });
    return { object: "list", data: rows, next: null };
  }

  async session(name) {
    return this.#find("trees", name, `the file has no session ${name}`);
  }

  async tokens(name, turn) {
    const encoded = this.#find("tokens", `${name}/${turn}`, "the file holds only the ids of whole paths");
    return decodeTokens(Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0)).buffer);
  }

  async drift(name, turn, basis = "") {
    const lanes = this.#find(
      "drift",
      `${name}/${turn}`,
      "the file compares only the last prompt of each path",
    );
    const lane = basis ? lanes.find((each) => each.basis === basis) : lanes[0];
    if (!lane) throw new Error("the prompt did not break with an earlier turn");
    return lane;
  }

  #find(kind, name, problem) {
    const table = this.data[kind];
    if (!Object.hasOwn(table, name)) throw new Error(problem);
    return table[name];
  }
}

/** All texts in messages, without names of roles, types and calls. */
function texts(value, key = "") {
  if (typeof value === "string") return ["role", "type", "id", "tool_call_id"].includes(key) ? [] : [value];
  if (typeof value !== "object" || value === null) return [];
  return Object.entries(value).flatMap(([name, each]) => texts(each, name));
}

/** Read the body of ids: see proxy/tokenproxy/viewer/tokens.py for the format. */
export function decodeTokens(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const start = 4 + size;
  const n = header.count;
  return {
    ...header,
    special: new Set(header.special),
    starts: header.turns.map((turn) => turn.start),
    alternatives: new Map(header.alternatives || []),
    ids: new Int32Array(buffer, start, n),
    logprobs: new Float32Array(buffer, start + 4 * n, n),
    flags: new Uint8Array(buffer, start + 8 * n, n),
  };
}
