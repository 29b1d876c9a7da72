// The panel of one model: the image with a map over it, the most likely classes, the metrics.

import { colour } from "./colours.ts";
import { element } from "./dom.ts";
import { type PatchMap, probabilities, type Query } from "./maps.ts";
import type { Model, Outputs } from "./model.ts";
import { pixelValues, type View, viewOf } from "./preprocessing.ts";
import type { Pixels } from "./resize.ts";
import type { Answerer, Opener, Result } from "./runner.ts";
import { VIEWS, type ViewName } from "./views.ts";

const CLASSES = 5;

// A rectangle of the source image, as fractions of its sides.
export type Area = { left: number; top: number; right: number; bottom: number };

export class Panel {
  readonly root = element("article", { class: "panel" });
  #picture = element("canvas", { class: "picture" });
  #overlay = element("canvas", { class: "overlay" });
  #marker = element("div", { class: "marker", hidden: "" });
  #stage = element("div", { class: "stage", tabindex: "0", role: "img" }, this.#picture, this.#overlay, this.#marker);
  #legend = element("div", { class: "legend" });
  #sliders = element("div", { class: "sliders" });
  #classes = element("ol", { class: "classes", "aria-label": "Most likely classes" });
  #status = element("p", { class: "status", role: "status" }, "Loading the model…");
  #runner: Answerer;
  #view: View | null = null;
  #outputs: Outputs = {};
  #shown: ViewName = "image";
  #query: Query = null;
  #layer: number;
  #head: number | null = null;
  #hidden: Uint8Array;
  #whole = true; // whether all that the model said of the present pixels is at hand

  constructor(
    private model: Model,
    private areas: Area[],
    private change: () => void, // the hidden areas are others
    picker: Node | null,
    open: Opener,
  ) {
    const millions = `${(model.parameters / 1e6).toPrecision(3)} M parameters`;
    const about = element("p", {}, `${model.family} · ${millions} · ${model.image_size[1]}×${model.image_size[0]} px`);
    const head = element("header", {}, element("h2", {}, picker ?? model.name), about);
    const words = element("div", { class: "answer" }, this.#classes, this.#status, figures(model));
    const seen = element("div", { class: "seen" }, this.#stage, this.#legend, this.#sliders);
    this.root.append(head, seen, words);
    this.#layer = Math.max(model.layers - 1, 0);
    this.#hidden = new Uint8Array(model.grid[0] * model.grid[1]);
    this.#listen();
    this.#runner = open(
      (result) => this.#receive(result),
      (reason) => this.#say(reason, true),
    );
  }

  close(): void {
    this.#runner.close();
  }

  look(image: Pixels): void {
    this.#view = viewOf(image, this.model.preprocessing);
    this.#query = null;
    this.hide(true);
  }

  // Hides patches whose center is in an area. While the user paints, only the current view is computed.
  hide(whole: boolean): void {
    if (this.#view === null) return;
    const view = this.#view;
    this.#hidden = this.#hidden.map((_, patch) => (this.#isInside(this.#areaOf(view, patch)) ? 1 : 0));
    const hidden = this.#hidden.some(Boolean) ? this.#hidden : null;
    const needs = this.#shown === "image" ? [] : this.#needs();
    this.#runner.ask(pixelValues(view.pixels, this.model, hidden), whole ? this.model.outputs : ["logits", ...needs]);
    this.#whole = whole;
    this.#drawPicture(view);
  }

  show(name: ViewName): void {
    this.#shown = name !== "image" && VIEWS[name].has(this.model) ? name : "image";
    this.#drawSliders();
    if (!this.#whole) this.hide(true);
    this.#drawMap();
  }

  #needs(): string[] {
    return this.#shown === "image" ? [] : VIEWS[this.#shown].needs(this.model, this.#layer);
  }

  #receive(result: Result): void {
    this.#outputs = { ...this.#outputs, ...result.outputs };
    this.#drawClasses(probabilities(result.outputs.logits.data, this.model.multi_label));
    this.#drawMap();
    this.#say(result.how);
    this.root.dispatchEvent(new CustomEvent("result", { bubbles: true, detail: { model: this.model, ...result } }));
  }

  #say(words: string, isWrong = false): void {
    this.#status.textContent = words;
    this.#status.classList.toggle("wrong", isWrong);
  }

  // ---- patches and positions

  #areaOf(view: View, patch: number): Area {
    const [height, width] = this.model.patch_px;
    const row = Math.floor(patch / this.model.grid[1]);
    const column = patch % this.model.grid[1];
    return {
      left: (view.left + column * width) / view.width,
      right: (view.left + (column + 1) * width) / view.width,
      top: (view.top + row * height) / view.height,
      bottom: (view.top + (row + 1) * height) / view.height,
    };
  }

  #isInside({ left, right, top, bottom }: Area): boolean {
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    return this.areas.some((area) => x > area.left && x < area.right && y > area.top && y < area.bottom);
  }

  #patchAt(event: PointerEvent): Query {
    const box = this.#stage.getBoundingClientRect();
    const [height, width] = this.model.image_size;
    const column = Math.floor((((event.clientX - box.left) / box.width) * width) / this.model.patch_px[1]);
    const row = Math.floor((((event.clientY - box.top) / box.height) * height) / this.model.patch_px[0]);
    const [h, w] = this.model.grid;
    return row >= 0 && row < h && column >= 0 && column < w ? row * w + column : null;
  }

  // Hides a patch, or shows it again.
  #set(patch: Query, hides: boolean, done: boolean): void {
    if (this.#view === null || patch === null || document.body.classList.contains("still")) return;
    const area = this.#areaOf(this.#view, patch);
    if (hides && !this.#hidden[patch]) this.areas.push(area);
    if (!hides) {
      const [x, y] = [(area.left + area.right) / 2, (area.top + area.bottom) / 2];
      const left = this.areas.filter((one) => !(x > one.left && x < one.right && y > one.top && y < one.bottom));
      this.areas.splice(0, this.areas.length, ...left);
    }
    if (done || hides !== Boolean(this.#hidden[patch])) this.change();
  }

  #listen(): void {
    let hides: boolean | null = null; // while painting: away, or back
    const painting = () => document.body.classList.contains("painting");
    this.#stage.addEventListener("pointerdown", (event) => {
      const patch = this.#patchAt(event);
      if (!painting()) return this.#ask(event.pointerType !== "mouse" && patch === this.#query ? null : patch);
      event.preventDefault();
      if (patch === null) return;
      this.#stage.setPointerCapture(event.pointerId);
      hides = !this.#hidden[patch];
      this.#set(patch, hides, false);
    });
    this.#stage.addEventListener("pointermove", (event) => {
      if (hides !== null) this.#set(this.#patchAt(event), hides, false);
      else if (event.pointerType === "mouse") this.#ask(this.#patchAt(event));
    });
    const stop = () => {
      if (hides === null) return;
      hides = null;
      this.hide(true);
    };
    this.#stage.addEventListener("pointerup", stop);
    this.#stage.addEventListener("pointercancel", stop);
    this.#stage.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && hides === null) this.#ask(null);
    });
    this.#stage.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event: KeyboardEvent): void {
    const [h, w] = this.model.grid;
    const steps: Record<string, [number, number]> = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
    };
    const step = steps[event.key];
    if (step) {
      const [row, column] = this.#query === null ? [0, 0] : [Math.floor(this.#query / w), this.#query % w];
      const moved = this.#query === null ? [0, 0] : step;
      const next = [Math.min(Math.max(row + moved[0], 0), h - 1), Math.min(Math.max(column + moved[1], 0), w - 1)];
      this.#ask(next[0] * w + next[1]);
    } else if (event.key === "Escape") this.#ask(null);
    else if ((event.key === " " || event.key === "Enter") && this.#query !== null) {
      this.#set(this.#query, !this.#hidden[this.#query], true);
    } else return;
    event.preventDefault();
  }

  #ask(query: Query): void {
    if (query === this.#query) return;
    this.#query = query;
    this.#drawMap();
  }

  // ---- drawing

  #drawPicture({ pixels }: View): void {
    const { width, height, data } = pixels;
    this.#stage.style.aspectRatio = `${width} / ${height}`;
    this.#stage.classList.toggle("coarse", width < 100);
    Object.assign(this.#picture, { width, height });
    const context = this.#picture.getContext("2d") as CanvasRenderingContext2D;
    const shown = context.createImageData(width, height);
    const sum = [0, 0, 0];
    for (let place = 0; place < width * height; place++) {
      for (let channel = 0; channel < 3; channel++) {
        shown.data[place * 4 + channel] = data[place * 3 + channel];
        sum[channel] += data[place * 3 + channel];
      }
      shown.data[place * 4 + 3] = 255;
    }
    context.putImageData(shown, 0, 0);
    context.fillStyle = `rgb(${sum.map((value) => Math.round(value / (width * height))).join(" ")})`;
    const [patchHeight, patchWidth] = this.model.patch_px;
    const columns = this.model.grid[1];
    this.#hidden.forEach((isHidden, patch) => {
      const [row, column] = [Math.floor(patch / columns), patch % columns];
      if (isHidden) context.fillRect(column * patchWidth, row * patchHeight, patchWidth, patchHeight);
    });
  }

  #map(): PatchMap | null {
    if (this.#shown === "image" || this.#needs().some((name) => !(name in this.#outputs))) return null;
    const choice = { layer: this.#layer, head: this.#head, query: this.#query };
    return VIEWS[this.#shown].map(this.model, this.#outputs, choice);
  }

  #drawMap(): void {
    const map = this.#map();
    this.#overlay.hidden = map === null;
    this.#legend.hidden = map === null;
    this.#drawMarker();
    if (map === null || this.#shown === "image") {
      this.#describe(null, 0);
      return;
    }
    const { scale, unit } = VIEWS[this.#shown];
    const [h, w] = this.model.grid;
    const [height, width] = this.model.image_size;
    const present = Array.from(map.values).filter((_, patch) => map.shown === null || map.shown[patch]);
    const most = present.reduce((one, other) => Math.max(one, other), Number.NEGATIVE_INFINITY);
    const least = scale === "cividis" ? present.reduce((one, other) => Math.min(one, other), most) : 0;
    Object.assign(this.#overlay, { width: w, height: h });
    this.#overlay.style.width = `${(w * this.model.patch_px[1] * 100) / width}%`;
    this.#overlay.style.height = `${(h * this.model.patch_px[0] * 100) / height}%`;
    const context = this.#overlay.getContext("2d") as CanvasRenderingContext2D;
    const drawn = context.createImageData(w, h);
    map.values.forEach((value, patch) => {
      const isShown = map.shown === null || map.shown[patch];
      drawn.data.set([...colour(scale, (value - least) / (most - least || 1)), isShown ? 255 : 0], patch * 4);
    });
    context.putImageData(drawn, 0, 0);
    const written = (value: number) => (scale === "viridis" ? `${(value * 100).toPrecision(2)}%` : value.toFixed(2));
    const bar = element("span", { class: `bar ${scale}` });
    this.#legend.replaceChildren(element("span", {}, least === 0 ? "0" : written(least)), bar, written(most));
    this.#legend.append(element("span", { class: "unit" }, `${unit}, from ${this.#from()}`));
    this.#describe(map, most);
  }

  #drawMarker(): void {
    this.#marker.hidden = this.#query === null;
    if (this.#query === null) return;
    const [[height, width], [patchHeight, patchWidth]] = [this.model.image_size, this.model.patch_px];
    const [row, column] = [Math.floor(this.#query / this.model.grid[1]), this.#query % this.model.grid[1]];
    Object.assign(this.#marker.style, {
      left: `${(column * patchWidth * 100) / width}%`,
      top: `${(row * patchHeight * 100) / height}%`,
      width: `${(patchWidth * 100) / width}%`,
      height: `${(patchHeight * 100) / height}%`,
    });
  }

  #from(): string {
    if (this.#query !== null) return this.#named(this.#query);
    const isAttention = this.#shown === "attention" || this.#shown === "rollout";
    if (!isAttention || this.model.class_token === null) return "the mean of all patches";
    return this.model.class_token === this.model.patch_start ? "the first patch" : "the class token";
  }

  #named(patch: number): string {
    const columns = this.model.grid[1];
    return `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
  }

  #describe(map: PatchMap | null, most: number): void {
    const first = this.#classes.querySelector("li")?.textContent;
    const answer = first ? ` Most likely: ${first}.` : "";
    const where = map === null ? -1 : map.values.indexOf(Math.fround(most));
    const strongest = where < 0 ? "" : `, highest at ${this.#named(where)}`;
    const over =
      map === null || this.#shown === "image" ? "" : ` ${VIEWS[this.#shown].title} from ${this.#from()}${strongest}.`;
    const hidden = this.#hidden.reduce((sum, value) => sum + value, 0);
    const without = hidden ? ` ${hidden === 1 ? "1 patch is" : `${hidden} patches are`} hidden.` : "";
    this.#stage.setAttribute("aria-label", `The image as ${this.model.name} sees it.${over}${without}${answer}`);
  }

  #drawClasses(shares: Float32Array): void {
    const best = Array.from(shares.keys())
      .sort((one, other) => shares[other] - shares[one])
      .slice(0, CLASSES);
    while (this.#classes.children.length < best.length) {
      const parts = ["name", "share", "bar"].map((name) => element("span", { class: name }));
      this.#classes.append(element("li", {}, parts[0], " ", parts[1], parts[2]));
    }
    best.forEach((label, rank) => {
      const [name, share, bar] = this.#classes.children[rank].children as unknown as HTMLElement[];
      name.textContent = this.model.labels[label];
      share.textContent = `${(shares[label] * 100).toFixed(1)}%`;
      bar.style.setProperty("--share", String(shares[label]));
    });
  }

  #drawSliders(): void {
    this.#sliders.replaceChildren();
    if (this.#shown === "image") return;
    const view = VIEWS[this.#shown];
    const depth = view.depth(this.model);
    this.#layer = Math.min(this.#layer, depth - 1);
    const name = (value: number) =>
      this.#shown === "features" ? (value ? `after ${value}` : "before 1") : `${value + 1}`;
    if (view.picks.includes("layer")) {
      this.#addSlider("Layer", 0, depth - 1, this.#layer, name, (value) => {
        this.#layer = value;
      });
    }
    if (view.picks.includes("head") && this.model.heads > 1) {
      const words = (value: number) => (value ? `${value}` : "mean of all");
      this.#addSlider("Head", 0, this.model.heads, this.#head === null ? 0 : this.#head + 1, words, (value) => {
        this.#head = value ? value - 1 : null;
      });
    }
  }

  #addSlider(
    title: string,
    min: number,
    max: number,
    value: number,
    words: (value: number) => string,
    pick: (value: number) => void,
  ): void {
    const input = element("input", { type: "range", min: `${min}`, max: `${max}`, value: `${value}` });
    const output = element("output", {}, words(value));
    input.setAttribute("aria-valuetext", words(value));
    input.addEventListener("input", () => {
      pick(Number(input.value));
      output.textContent = words(Number(input.value));
      input.setAttribute("aria-valuetext", words(Number(input.value)));
      if (!this.#whole) this.hide(true); // painting left other layers out
      this.#drawMap();
    });
    this.#sliders.append(element("label", {}, element("span", {}, title), input, output));
  }
}

function figures(model: Model): HTMLElement {
  const list = element("dl", { class: "figures" });
  for (const { name, value, note } of model.figures) {
    list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, note))));
  }
  return list;
}
