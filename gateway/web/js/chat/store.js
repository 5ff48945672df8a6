// The kept conversations, in this browser's IndexedDB: heads for the list, and bodies with all turns. At most so many, and
// so large; what is too much is refused, and nothing is dropped to make room.

const [NAME, VERSION] = ["outrider", 1];
export const [MOST, MOST_CHARS] = [200, 32e6];

// A reason to show as it is.
export class NotKept extends Error {}

export class Store {
  constructor() {
    this.opening = null;
  }

  // Heads, the newest first: `id`, `title`, `changed`, `turns`, `size` in characters.
  async list() {
    const heads = await this.use("readonly", (heads) => got(heads.getAll()));
    return heads.sort((one, other) => (one.changed < other.changed ? 1 : -1));
  }

  async get(id) {
    return this.use("readonly", (_, bodies) => got(bodies.get(id)));
  }

  async all() {
    return this.use("readonly", (_, bodies) => got(bodies.getAll()));
  }

  async delete(id) {
    await this.use("readwrite", (heads, bodies) => Promise.all([got(heads.delete(id)), got(bodies.delete(id))]));
  }

  // Keeps records, each in the place of the one with its id: all of them, or none and NotKept.
  async put(records) {
    const made = records.map((record) => [head(record), record]);
    await this.use("readwrite", async (heads, bodies) => {
      const kept = new Map((await got(heads.getAll())).map((each) => [each.id, each]));
      for (const [each] of made) kept.set(each.id, each);
      const size = [...kept.values()].reduce((sum, each) => sum + each.size, 0);
      if (kept.size > MOST) throw new NotKept(`${kept.size} conversations would be too many: this page keeps ${MOST}. Delete some, or export them first.`);
      if (size > MOST_CHARS) throw new NotKept(`${millions(size)} million characters would be too much: this page keeps ${millions(MOST_CHARS)} million. Delete some conversations, or export them first.`);
      await Promise.all(made.flatMap(([each, record]) => [got(heads.put(each)), got(bodies.put(record))]));
    });
  }

  // What `act` gives, in one transaction, which is undone when it throws.
  async use(mode, act) {
    this.opening ??= open(() => { this.opening = null; });
    try {
      const transaction = (await this.opening).transaction(["heads", "bodies"], mode);
      const ended = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error ?? new Error("it was given up"));
      });
      // Whoever waits for it may have failed before.
      ended.catch(() => null);
      try {
        const found = await act(transaction.objectStore("heads"), transaction.objectStore("bodies"));
        await ended;
        return found;
      } catch (error) {
        if (error instanceof NotKept) transaction.abort();
        throw error;
      }
    } catch (error) {
      if (error instanceof NotKept) throw error;
      this.opening = null;
      if (error.name === "QuotaExceededError") throw new NotKept("The browser has no more room for this page. Delete some conversations, or export them first.");
      if (error.name === "VersionError") throw new NotKept("The conversations in this browser were kept by a newer page, which this one cannot read.");
      throw new NotKept(`This browser keeps no conversations: ${error.message}.`);
    }
  }
}

function open(closed) {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const store of ["heads", "bodies"]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab with an older page has them open"));
    request.onsuccess = () => {
      const database = request.result;
      // A newer page in another tab wants to change it, or the browser has dropped it.
      database.onversionchange = () => { database.close(); closed(); };
      database.onclose = closed;
      resolve(database);
    };
  });
}

function head(record) {
  const { id, title, changed, turns } = record;
  return { id, title, changed, turns: turns.length, size: JSON.stringify(record).length };
}

function got(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function millions(count) {
  return (count / 1e6).toFixed(1);
}
