// Where a page is opened as a file the browser starts no workers: the theme's search runs in a frame instead.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: done });
        frame.contentDocument.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
