// Builds elements. Text only ever becomes a text node, so no recorded text is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `properties` are attributes, `on...` listeners, `class`, `data` and `style` objects. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element, with the arguments of `el`. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Replace all children of a node. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/** A button with a text and a listener. */
export function button(text, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, text);
}

/** A labelled `<select>`; `options` are [value, text] pairs. */
export function select(label, options, value, onchange) {
  const items = options.map(([name, text]) => el("option", { value: name, selected: name === value }, text));
  const choice = el("select", { onchange: () => onchange(choice.value), "aria-label": label }, items);
  return choice;
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(
    ...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}
