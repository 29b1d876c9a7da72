// A page that was opened from disk may start no worker, and the search is one: there it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      this.inside = inside;
      inside.postMessage = (data) => {
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      };
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.started = this.load(address);
    }
    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: address, onload: resolve, onerror: reject });
        this.inside.document.body.append(script);
      });
    }
    postMessage(data) {
      this.started.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
