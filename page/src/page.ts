// The page: it reads images and shows up to two models side by side.

import { element, part } from "./dom.ts";
import { listenForImages, showExamples } from "./input.ts";
import type { Page } from "./model.ts";
import { type Area, Panel } from "./panel.ts";
import { decoded } from "./preprocessing.ts";
import type { Pixels } from "./resize.ts";
import { Runner } from "./runner.ts";
import { readStill, Still, type StillPage } from "./still.ts";
import { type ViewName, viewsOf } from "./views.ts";

const HINTS = {
  looking:
    "Point at a patch, or move over the image with the arrow keys. Leave the image (Esc) to see what the output attends to.",
  painting: "Drag over the image to hide patches, and over hidden ones to show them again. On the keyboard, use space.",
};

const areas: Area[] = [];
const panels: Panel[] = [];
let shown = 2; // models side by side
let image: Pixels | null = null;
let last: Blob | null = null; // last file from the user
let view: ViewName = "image";
let still: StillPage | null = null;

function notice(words: string): void {
  const place = part<HTMLElement>("#notice");
  place.textContent = words;
  place.hidden = words === "";
}

async function receive(file: Blob): Promise<void> {
  last = file;
  let read: Pixels;
  try {
    read = await decoded(file);
  } catch (error) {
    if (file === last) notice(error instanceof Error ? error.message : String(error));
    return;
  }
  if (file !== last) return; // a later file was read first
  image = read;
  notice("");
  forget();
  for (const panel of panels) panel.look(image);
}

function forget(): void {
  areas.length = 0;
  part<HTMLButtonElement>("#restore").disabled = true;
}

function change(): void {
  part<HTMLButtonElement>("#restore").disabled = areas.length === 0;
  for (const panel of panels) panel.hide(false);
}

function show(name: ViewName): void {
  view = name;
  for (const panel of panels) panel.show(name);
}

function place(page: Page, slot: number, number: number): void {
  const model = page.models[number];
  const picker = page.models.length > shown ? pick(page, slot, number) : null;
  const panel = new Panel(model, areas, change, picker, (receive, fail) =>
    still === null ? new Runner(model, receive, fail) : new Still(still.outputs, receive),
  );
  panels[slot]?.root.replaceWith(panel.root);
  panels[slot]?.close();
  if (panels[slot] === undefined) part("#panels").append(panel.root);
  panels[slot] = panel;
  panel.show(view);
  if (image !== null) panel.look(image);
}

function pick(page: Page, slot: number, number: number): HTMLElement {
  const options = page.models.map(({ name }, index) => element("option", { value: `${index}` }, name));
  const select = element("select", { "aria-label": "Model" }, ...options);
  select.value = `${number}`;
  select.addEventListener("change", () => place(page, slot, Number(select.value)));
  return select;
}

// Returns the indices of the models named in the URL (#model=NAME&model=NAME), or of the first two.
function chosen(page: Page): number[] {
  const names = new URLSearchParams(location.hash.slice(1)).getAll("model");
  const named = names.map((name) => page.models.findIndex((model) => model.name === name)).filter((at) => at >= 0);
  return (named.length ? named : [...page.models.keys()]).slice(0, 2);
}

function drawViews(page: Page): void {
  const views = viewsOf(page.models);
  view = views.some(([name]) => name === "attention") ? "attention" : "image";
  for (const [name, title] of views) {
    const input = element("input", { type: "radio", name: "view", value: name });
    input.checked = name === view;
    input.addEventListener("change", () => show(name));
    part("#views").append(element("label", {}, input, element("span", {}, title)));
  }
}

function listenToControls(): void {
  const strength = part<HTMLInputElement>("#strength");
  const paint = part<HTMLInputElement>("#paint");
  const follow = () => part<HTMLElement>("#panels").style.setProperty("--strength", `${Number(strength.value) / 100}`);
  const toggle = () => {
    document.body.classList.toggle("painting", paint.checked);
    part("#hint").textContent = paint.checked ? HINTS.painting : HINTS.looking;
  };
  strength.addEventListener("input", follow);
  paint.addEventListener("change", toggle);
  part("#restore").addEventListener("click", () => {
    forget();
    for (const panel of panels) panel.hide(true);
  });
  follow();
  toggle();
}

async function start(): Promise<void> {
  if ((typeof WebAssembly === "undefined" && readStill() === null) || typeof OffscreenCanvas === "undefined") {
    notice("This browser cannot run the model, as it lacks WebAssembly or canvases. Use a current browser.");
    return;
  }
  still = readStill();
  const page: Page = still?.page ?? (await (await fetch("page.json", { cache: "no-cache" })).json());
  document.title = page.models.map(({ name }) => name).join(", ");
  const numbers = chosen(page);
  shown = numbers.length;
  if (shown > 1) part("#title").textContent = "What the models see";
  notice("");
  drawViews(page);
  listenToControls();
  numbers.forEach((number, slot) => {
    place(page, slot, number);
  });
  part<HTMLElement>("#panels").dataset.count = `${panels.length}`;
  listenForImages(receive, notice);
  showExamples(page.examples, receive);
  if (still !== null) {
    document.body.classList.add("still");
    part("#how").textContent = "One image, as the model saw it in Python.";
    await receive(await (await fetch(still.image)).blob());
  } else if (page.examples[0]) await receive(await (await fetch(page.examples[0].file)).blob());
}

start().catch((error) => notice(`The page cannot be shown: ${error instanceof Error ? error.message : error}`));
