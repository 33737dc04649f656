// Elements of the page. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Only where it differs, so that a selection or a screen reader is left alone.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// One child of `parent` an item, in their order. A child stays as long as its key does: with its focus, open or not.
export function keepChildren(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child) {
      old.delete(key);
    } else {
      child = create(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  for (const child of old.values()) child.remove();
}

const classOf = ({number, long}) => (number ? "number" : long ? "long" : null);

// A table of `columns`, [{name, number, long}], with a caption that only screen readers see.
export function makeTable(caption, columns) {
  const head = columns.map((column) => make("th", {scope: "col", class: classOf(column)}, column.name));
  const body = make("tbody");
  const top = make("thead", {}, make("tr", {}, ...head));
  const table = make("table", {}, make("caption", {class: "hidden"}, caption), top, body);
  const element = make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption}, table);
  return {columns, body, element};
}

// `rows`: lists of texts by column, the first of which names the row.
export function fillTable({columns, body}, rows) {
  keepChildren(
    body,
    rows.map((cells, index) => ({cells, index})),
    ({index}) => index,
    ({cells}) => {
      const cell = (_, i) => make(i ? "td" : "th", {scope: i ? null : "row", class: classOf(columns[i])});
      return make("tr", {}, ...cells.map(cell));
    },
    (row, {cells}) => cells.forEach((cell, i) => setText(row.children[i], cell)),
  );
}
