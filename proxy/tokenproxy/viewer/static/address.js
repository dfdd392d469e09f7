// The part of the address after `#`: every view, turn and token has one that can be kept and sent.
//
//   #/?search=NAME&before=PLACE              the list; also messages, where and fold, as the server takes them
//   #/s/SESSION                              a session
//   #/s/SESSION/TURN/VIEW?token=N            a turn in a view: conversation, tokens or plots
//   #/compare/SESSION/TURN/SESSION/TURN      paths side by side
//
// "-" in place of a turn is the longest path of the session.

export const LONGEST = "-";
export const VIEWS = ["conversation", "tokens", "plots"];

/** Read an address. Unknown ones are the list. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [kind, ...rest] = path.split("/").map(decoded);
  const parameters = new URLSearchParams(query);
  if (kind === "s" && rest[0]) {
    const view = VIEWS.includes(rest[2]) ? rest[2] : "conversation";
    const token = parameters.has("token") ? Number(parameters.get("token")) : null;
    return {
      kind: "session",
      session: rest[0],
      turn: turnOf(rest[1]),
      view,
      token: Number.isInteger(token) ? token : null,
    };
  }
  if (kind === "compare" && rest.length >= 2) {
    const sides = [];
    for (let i = 0; i + 1 < rest.length; i += 2) sides.push({ session: rest[i], turn: turnOf(rest[i + 1]) });
    return { kind: "compare", sides };
  }
  return { kind: "list", query: parameters };
}

/** The turn that a part of a path names; null for the longest path. */
function turnOf(part) {
  return part && part !== LONGEST ? part : null;
}

/** A part of a path; as it is if it was cut or typed so that it cannot be decoded. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function listAddress(parameters) {
  const query = new URLSearchParams(parameters).toString();
  return query ? `#/?${query}` : "#/";
}

export function sessionAddress(session, turn = null, view = "conversation", token = null) {
  let address = `#/s/${encodeURIComponent(session)}`;
  if (turn) address += `/${encodeURIComponent(turn)}/${view}`;
  return token === null ? address : `${address}?token=${token}`;
}

export function compareAddress(sides) {
  return `#/compare/${sides.map(({ session, turn }) => `${encodeURIComponent(session)}/${turn || LONGEST}`).join("/")}`;
}
