// Input of images: a file, the clipboard, a drop, the camera, the examples.

import { element, part } from "./dom.ts";
import type { Page } from "./model.ts";

export function listenForImages(receive: (file: Blob) => void, fail: (reason: string) => void): void {
  const file = part<HTMLInputElement>("#file");
  file.addEventListener("change", () => {
    if (file.files?.[0]) receive(file.files[0]);
    file.value = "";
  });
  document.addEventListener("paste", (event) => {
    const pasted = event.clipboardData?.files[0];
    if (pasted) receive(pasted);
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  for (const name of ["dragleave", "drop"]) {
    document.addEventListener(name, () => document.body.classList.remove("dropping"));
  }
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const dropped = event.dataTransfer?.files[0];
    if (dropped) receive(dropped);
    else fail("The dropped file is not an image. Drop a JPEG, PNG or WebP file.");
  });
  listenToCamera(receive, fail);
}

function listenToCamera(receive: (file: Blob) => void, fail: (reason: string) => void): void {
  const dialog = part<HTMLDialogElement>("#shot");
  const video = part<HTMLVideoElement>("#video");
  part("#camera").addEventListener("click", async () => {
    try {
      video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
      dialog.showModal();
    } catch {
      fail("The camera cannot be used. Connect one, and allow the browser to use it.");
    }
  });
  part("#take").addEventListener("click", async () => {
    const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
    canvas.getContext("2d")?.drawImage(video, 0, 0);
    receive(await canvas.convertToBlob());
    dialog.close();
  });
  part("#close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    for (const track of (video.srcObject as MediaStream).getTracks()) track.stop();
    video.srcObject = null;
  });
}

export function showExamples(examples: Page["examples"], receive: (file: Blob) => void): void {
  part("#examples").append(
    ...examples.map(({ file, label }) => {
      const button = element("button", { type: "button", title: label }, element("img", { src: file, alt: label }));
      button.addEventListener("click", async () => receive(await (await fetch(file)).blob()));
      return button;
    }),
  );
}
