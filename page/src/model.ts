// The models as `page.json` describes them; src/hf_vit/pages/description.py writes it.
// Legend: h x w patch grid, N tokens, D hidden size, A heads.

export interface Preprocessing {
  resize: { height: number; width: number } | { shortest_edge: number } | null;
  filter: "bilinear" | "bicubic";
  crop: { height: number; width: number } | null;
  factor: number;
  mean: number[];
  std: number[];
}

export interface Model {
  name: string;
  family: string;
  parameters: number;
  labels: string[];
  multi_label: boolean;
  image_size: [number, number];
  grid: [number, number];
  patch_px: [number, number];
  attention: "full" | "axial" | null;
  layers: number;
  heads: number;
  patch_start: number;
  class_token: number | null;
  preprocessing: Preprocessing;
  figures: { name: string; value: string; note: string }[];
  outputs: string[];
  bytes: number;
  folder: string;
}

export interface Page {
  models: Model[];
  examples: { file: string; label: string }[];
}

export interface Tensor {
  dims: readonly number[];
  data: Float32Array;
}

export type Outputs = Record<string, Tensor>;
