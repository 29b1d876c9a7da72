// The maps that can be drawn over the image, with their titles and units.

import type { Scale } from "./colours.ts";
import { attention, type PatchMap, type Query, rollout, similarity } from "./maps.ts";
import type { Model, Outputs } from "./model.ts";

export type ViewName = "image" | "attention" | "rollout" | "features" | "positions";

export interface Choice {
  layer: number;
  head: number | null;
  query: Query;
}

interface MapView {
  title: string;
  scale: Scale;
  unit: string;
  picks: ("layer" | "head")[];
  has(model: Model): boolean;
  needs(model: Model, layer: number): string[]; // outputs of the graph
  map(model: Model, outputs: Outputs, choice: Choice): PatchMap;
  depth(model: Model): number; // number of layers to choose from
}

const attentions = (model: Model, layer: number) =>
  (model.attention === "axial" ? ["row_attention", "column_attention"] : ["attention"]).map(
    (kind) => `${kind}_${layer}`,
  );

export const VIEWS: Record<Exclude<ViewName, "image">, MapView> = {
  attention: {
    title: "Attention",
    scale: "viridis",
    unit: "share of the attention",
    picks: ["layer", "head"],
    has: (model) => model.attention !== null,
    needs: attentions,
    map: (model, outputs, { layer, head, query }) => attention(model, outputs, layer, head, query),
    depth: (model) => model.layers,
  },
  rollout: {
    title: "Rollout",
    scale: "viridis",
    unit: "share of the attention through all layers",
    picks: [],
    has: (model) => model.attention !== null,
    needs: (model) => Array.from({ length: model.layers }, (_, layer) => attentions(model, layer)).flat(),
    map: (model, outputs, { query }) => rollout(model, outputs, query),
    depth: (model) => model.layers,
  },
  features: {
    title: "Features",
    scale: "cividis",
    unit: "cosine similarity of the patches' features",
    picks: ["layer"],
    has: (model) => model.layers > 0,
    needs: (_, layer) => [`hidden_${layer}`],
    map: (model, outputs, { layer, query }) => similarity(model, outputs[`hidden_${layer}`], query, model.patch_start),
    depth: (model) => model.layers + 1,
  },
  positions: {
    title: "Positions",
    scale: "cividis",
    unit: "cosine similarity of the position embeddings",
    picks: [],
    has: (model) => model.outputs.includes("positions"),
    needs: () => ["positions"],
    map: (model, outputs, { query }) => similarity(model, outputs.positions, query, 0),
    depth: () => 0,
  },
};

export function viewsOf(models: Model[]): [ViewName, string][] {
  const maps = Object.entries(VIEWS).filter(([, view]) => models.some((model) => view.has(model)));
  return [["image", "Image"], ...maps.map(([name, { title }]): [ViewName, string] => [name as ViewName, title])];
}
