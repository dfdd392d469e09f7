// Numbers, times and token texts as people read them.

const NUMBER = new Intl.NumberFormat("en");

/** 128000 as "128,000". */
export function count(value) {
  return value === null || value === undefined ? "–" : NUMBER.format(value);
}

/** "1 turn", "3 turns". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Seconds as "0.42 s", "12 s", "3 min". */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  return seconds < 120 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

/** A time in seconds since the epoch, in the reader's zone: "2026-11-23 06:13:34". */
export function time(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const local = new Date(seconds * 1000 - new Date(seconds * 1000).getTimezoneOffset() * 60000);
  return local.toISOString().slice(0, 19).replace("T", " ");
}

/** How long ago a time was. */
export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  if (passed < 60) return "just now";
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return passed < 86400 ? `${Math.floor(passed / 3600)} h ago` : `${Math.floor(passed / 86400)} d ago`;
}

/** Three digits of a number that may be missing. */
export function decimal(value, digits = 3) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

/** A number such as a reward, without trailing zeros. */
export function reward(value) {
  return value === null || value === undefined ? "–" : String(Math.round(value * 1e4) / 1e4);
}

/** A share as "3.2 %". */
export function percent(value) {
  return `${Math.round(value * 1000) / 10} %`;
}

/** A pair of the metadata as the server writes it. */
export function pairText(key, value) {
  return `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`;
}

/** The bytes of a latin-1 string. */
export function bytesOf(latin) {
  return Uint8Array.from(latin, (character) => character.charCodeAt(0));
}

/** The text of a latin-1 string that holds UTF-8; invalid bytes become U+FFFD. */
export function textOf(latin) {
  return new TextDecoder().decode(bytesOf(latin));
}

/** The UTF-8 bytes of a text as a latin-1 string. */
export function latinOf(text) {
  let latin = "";
  for (const byte of new TextEncoder().encode(text)) latin += String.fromCharCode(byte);
  return latin;
}

/**
 * A token as visible characters: "·" for a space, "⏎" for a line feed, "→" for a tab, "‹e2›" for a byte that is
 * a part of a character only, a control picture for other controls.
 */
export function glyphs(latin) {
  let shown = "";
  for (const part of splitUtf8(bytesOf(latin))) {
    if (typeof part === "number") shown += `‹${part.toString(16).padStart(2, "0")}›`;
    else for (const character of part) shown += glyph(character);
  }
  return shown;
}

function glyph(character) {
  if (character === " ") return "·";
  if (character === "\n") return "⏎";
  if (character === "\t") return "→";
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  if (code === 127) return "␡";
  // marks without a width of their own, bidirectional controls, and white space of other scripts
  if (/[\p{Cf}\p{Zs}\p{Zl}\p{Zp}\p{Mn}]/u.test(character)) return `‹${code.toString(16)}›`;
  return character;
}

/** Valid characters as texts, and the bytes between them as numbers. */
function splitUtf8(bytes) {
  const parts = [];
  let at = 0;
  while (at < bytes.length) {
    const size =
      bytes[at] < 0x80 ? 1 : bytes[at] >= 0xf0 ? 4 : bytes[at] >= 0xe0 ? 3 : bytes[at] >= 0xc2 ? 2 : 0;
    const text = size ? decoded(bytes.subarray(at, at + size)) : null;
    if (text !== null && at + size <= bytes.length) {
      parts.push(text);
      at += size;
    } else {
      parts.push(bytes[at]);
      at += 1;
    }
  }
  return parts;
}

const STRICT = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function decoded(bytes) {
  try {
    return STRICT.decode(bytes);
  } catch {
    return null;
  }
}

/** How many columns of a monospaced font a text takes: wide characters take two. */
export function columns(text) {
  let total = 0;
  for (const character of text) total += isWide(character.codePointAt(0)) ? 2 : 1;
  return total;
}

function isWide(code) {
  return (
    code >= 0x1100 &&
    (code <= 0x115f ||
      (code >= 0x2e80 && code <= 0xa4cf) ||
      (code >= 0xac00 && code <= 0xd7a3) ||
      (code >= 0xf900 && code <= 0xfaff) ||
      (code >= 0xfe30 && code <= 0xfe6f) ||
      (code >= 0xff00 && code <= 0xff60) ||
      (code >= 0x1f300 && code <= 0x1faff) ||
      code >= 0x20000)
  );
}
