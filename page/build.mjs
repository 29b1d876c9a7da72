// Bundles src/ into the package's static files; `node build.mjs FOLDER` writes them elsewhere, to be compared.
import { copyFile, mkdir } from "node:fs/promises";
import { build } from "esbuild";

const output = process.argv[2] ?? "../src/hf_vit/pages/static";
await mkdir(output, { recursive: true });
await build({
  entryPoints: ["src/page.ts", "src/worker.ts"],
  outdir: output,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "none",
});
for (const file of ["index.html", "style.css"]) await copyFile(`src/${file}`, `${output}/${file}`);
