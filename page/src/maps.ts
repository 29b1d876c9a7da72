// Computes one value per patch from attention maps and hidden states.
// Legend: h x w patch grid, P = h*w patches, N tokens, A heads.

import type { Model, Outputs, Tensor } from "./model.ts";

export type Query = number | null; // a patch (row by row), or the output: class token, without one the mean of all

export interface PatchMap {
  values: Float32Array; // P
  shown: Uint8Array | null; // P, 1 where there is a number; null: everywhere
}

const IDENTITY = 0.5; // share of the residual connection in a rollout, as hf-vit analyze has it

// Returns the start vector [N] of a query.
function start(model: Model, tokens: number, query: Query): Float64Array {
  const patches = model.grid[0] * model.grid[1];
  const vector = new Float64Array(tokens);
  if (query !== null) vector[model.patch_start + query] = 1;
  else if (model.class_token !== null) vector[(model.class_token + tokens) % tokens] = 1;
  else vector.fill(1 / patches, model.patch_start, model.patch_start + patches);
  return vector;
}

function tokensOf(model: Model, outputs: Outputs): number {
  return outputs.attention_0?.dims[1] ?? model.grid[0] * model.grid[1];
}

function patchesOf(model: Model, tokens: Float64Array): Float32Array {
  const [h, w] = model.grid;
  return Float32Array.from(tokens.subarray(model.patch_start, model.patch_start + h * w));
}

// Multiplies a row vector with one layer's attention [A, N, N], averaged over heads or of one head.
function throughFull(vector: Float64Array, map: Tensor, head: number | null): Float64Array {
  const [heads, tokens] = map.dims;
  const result = new Float64Array(tokens);
  const chosen = head === null ? Array.from({ length: heads }, (_, index) => index) : [head];
  for (const index of chosen) {
    for (let query = 0; query < tokens; query++) {
      const weight = vector[query] / chosen.length;
      if (weight === 0) continue;
      const row = (index * tokens + query) * tokens;
      for (let key = 0; key < tokens; key++) result[key] += weight * map.data[row + key];
    }
  }
  return result;
}

// The same for an axial layer [lines, A, side, side], along rows or columns.
function throughLines(vector: Float64Array, map: Tensor, head: number | null, alongRows: boolean): Float64Array {
  const [lines, heads, side] = map.dims;
  const result = new Float64Array(lines * side);
  const place = (line: number, index: number) => (alongRows ? line * side + index : index * lines + line);
  const chosen = head === null ? Array.from({ length: heads }, (_, index) => index) : [head];
  for (let line = 0; line < lines; line++) {
    for (const index of chosen) {
      for (let query = 0; query < side; query++) {
        const weight = vector[place(line, query)] / chosen.length;
        if (weight === 0) continue;
        const row = ((line * heads + index) * side + query) * side;
        for (let key = 0; key < side; key++) result[place(line, key)] += weight * map.data[row + key];
      }
    }
  }
  return result;
}

export function attention(model: Model, outputs: Outputs, layer: number, head: number | null, query: Query): PatchMap {
  const vector = start(model, tokensOf(model, outputs), query);
  if (model.attention === "full") {
    return { values: patchesOf(model, throughFull(vector, outputs[`attention_${layer}`], head)), shown: null };
  }
  const rows = throughLines(vector, outputs[`row_attention_${layer}`], head, true);
  const columns = throughLines(vector, outputs[`column_attention_${layer}`], head, false);
  if (query === null) return { values: composed(model, outputs, layer, head, vector), shown: null };
  const [, w] = model.grid;
  const values = Float32Array.from(rows, (value, place) => value + columns[place]);
  const inLines = (place: number) =>
    Math.floor(place / w) === Math.floor(query / w) || place % w === query % w ? 1 : 0;
  values[query] = Math.max(rows[query], columns[query]);
  return { values, shown: Uint8Array.from(values, (_, place) => inLines(place)) };
}

// Applies column attention and then row attention of every head.
function composed(model: Model, outputs: Outputs, layer: number, head: number | null, vector: Float64Array) {
  const heads = head === null ? Array.from({ length: model.heads }, (_, index) => index) : [head];
  const values = new Float32Array(vector.length);
  for (const one of heads) {
    const columns = throughLines(vector, outputs[`column_attention_${layer}`], one, false);
    const both = throughLines(columns, outputs[`row_attention_${layer}`], one, true);
    both.forEach((value, place) => {
      values[place] += value / heads.length;
    });
  }
  return values;
}

// Attention rollout (arXiv 2010.11929, appendix D.8), computed from the output back to the patches.
export function rollout(model: Model, outputs: Outputs, query: Query): PatchMap {
  let vector = start(model, tokensOf(model, outputs), query);
  const mixed = (next: Float64Array) =>
    Float64Array.from(next, (value, place) => (1 - IDENTITY) * value + IDENTITY * vector[place]);
  for (let layer = model.layers - 1; layer >= 0; layer--) {
    if (model.attention === "full") {
      vector = mixed(throughFull(vector, outputs[`attention_${layer}`], null));
    } else {
      vector = mixed(throughLines(vector, outputs[`column_attention_${layer}`], null, false));
      vector = mixed(throughLines(vector, outputs[`row_attention_${layer}`], null, true));
    }
  }
  return { values: patchesOf(model, vector), shown: null };
}

// Cosine similarity of one row of [rows, D] with the P rows from `first` on.
export function similarity(model: Model, table: Tensor, query: Query, first: number): PatchMap {
  const [h, w] = model.grid;
  const width = table.dims[1];
  const row = (place: number) => table.data.subarray((first + place) * width, (first + place + 1) * width);
  const asked = query === null ? mean(h * w, width, row) : row(query);
  const values = Float32Array.from({ length: h * w }, (_, place) => cosine(asked, row(place)));
  return { values, shown: null };
}

function mean(count: number, width: number, row: (place: number) => Float32Array): Float32Array {
  const sum = new Float32Array(width);
  for (let place = 0; place < count; place++) {
    const values = row(place);
    for (let index = 0; index < width; index++) sum[index] += values[index] / count;
  }
  return sum;
}

function cosine(one: Float32Array, other: Float32Array): number {
  let product = 0;
  let length = 0;
  let otherLength = 0;
  for (let index = 0; index < one.length; index++) {
    product += one[index] * other[index];
    length += one[index] ** 2;
    otherLength += other[index] ** 2;
  }
  return product / Math.max(Math.sqrt(length * otherLength), 1e-12);
}

export function probabilities(logits: Float32Array, multiLabel: boolean): Float32Array {
  if (multiLabel) return logits.map((value) => 1 / (1 + Math.exp(-value)));
  const largest = logits.reduce((most, value) => Math.max(most, value), Number.NEGATIVE_INFINITY);
  const powers = Float64Array.from(logits, (value) => Math.exp(value - largest));
  const total = powers.reduce((sum, value) => sum + value, 0);
  return Float32Array.from(powers, (value) => value / total);
}
