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
  node.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined));
}

/** Replace all children of a node. The focus goes from a control to the new one of its kind and name. */
export function renew(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement : null;
  const place = focused ? alike(node, focused).indexOf(focused) : -1;
  show(node, ...children);
  if (place >= 0) alike(node, focused)[place]?.focus({ preventScroll: true });
}

/** The elements in a node with the tag and the name of a control. */
function alike(node, control) {
  const nameOf = (each) => each.getAttribute("aria-label") ?? each.textContent;
  return [...node.querySelectorAll(control.localName)].filter((each) => nameOf(each) === nameOf(control));
}

/** A button with a text and a listener. */
export function button(text, onclick, properties = {}) {
  return el("button", { type: "button", onclick, ...properties }, text);
}

/** A labelled `<select>`; `options` are [value, text] pairs. */
export function select(label, options, value, onchange) {
  const choice = el("select", { onchange: () => onchange(choice.value), "aria-label": label });
  setOptions(choice, options, value);
  return choice;
}

/** Give a `<select>` its options and value. Equal options stay: a reader may have opened the list of them. */
export function setOptions(choice, options, value) {
  const old = [...choice.options].map((option) => [option.value, option.textContent]);
  if (JSON.stringify(old) !== JSON.stringify(options))
    show(
      choice,
      options.map(([name, text]) => el("option", { value: name }, text)),
    );
  choice.value = value;
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
