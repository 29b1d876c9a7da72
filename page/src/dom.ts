// Creates elements whose content is text, so that names of models and classes are never HTML.

export function element<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[Name] {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function part<Kind extends Element>(selector: string): Kind {
  const there = document.querySelector<Kind>(selector);
  if (there === null) throw new Error(`the page has no ${selector}`);
  return there;
}
